#!/bin/bash
# What the pods of a job run: `pod.sh head` serves etcd and submits the script, `pod.sh node` trains. See job.yaml.
set -euo pipefail
umask 077
shared=${SHARED:-/shared}/.elasticd # seen by all pods; keys for etcd lie there, readable by their user only
state=${STATE:-/var/lib/elasticd}
head=${HEAD:-head.elasticd}         # the head's name, by the headless service
port=${PORT:-2379}
node=${NODE:-$(hostname)}
job=job
mkdir -p "$shared"

until_there() { # until_there FILE SECONDS
    for ((i = 0; i < $2 * 5; i++)); do
        [ -e "$1" ] && return 0
        [ -e "$shared/failed" ] && return 1
        sleep 0.2
    done
    echo "pod.sh: $1 has not appeared within $2 s" >&2
    return 1
}

ctl() { elasticctl --socket "$state/elasticd.sock" "$@"; }

settings=(--cluster "$job" --state-dir "$state" --node "$node" --set http.listen=)

# Starts elasticd, and again when it dies: training goes on meanwhile, since agents and etcd outlive it. A setting that
# it refuses ends the job, which would else train on the other nodes alone.
keep() {
    local code why began=()
    while true; do
        began+=("$SECONDS")
        elasticd "${settings[@]}" &
        code=0
        wait $! || code=$?
        case $code in
        0) return 0 ;; # told to end
        78 | 126 | 127)
            why=$(elasticd "${settings[@]}" --check 2>&1) && why="its log says why"
            echo "$node: elasticd cannot run here (exit code $code): $why" >"$shared/failed-$node"
            mv "$shared/failed-$node" "$shared/failed"
            return "$code"
            ;;
        esac
        if ((${#began[@]} >= 5 && SECONDS - began[-5] < 60)); then
            echo "pod.sh: elasticd has died 5 times within a minute" >&2
            return "$code"
        fi
        echo "pod.sh: elasticd has died (exit code $code), and is started again" >&2
        sleep 1
    done
}

over() { # over CODE: the job's end, also for the nodes
    if [ -e "$shared/failed" ]; then echo "pod.sh: $(<"$shared/failed")" >&2; fi
    rm -f "$shared"/{ca.pem,client.pem,client-key.pem,cluster.key,ready,failed}
    touch "$shared/over"
    elasticd "${settings[@]}" --stop || true
    exit "$1"
}

head() {
    rm -f "$shared"/{over,ready,failed} # of a job before this one, or a head
    settings+=(--address "$head" --set "etcd.embedded_listen=$POD_IP:$port" --set slots=1)
    keep &
    local keeper=$!
    trap 'exit 143' TERM INT # the next head goes on with the same etcd; training does not need it meanwhile
    if ! { until_there "$state/etcd/tls/client-key.pem" 60 && until_there "$state/cluster.key" 60; }; then
        [ -e "$shared/failed" ] && over 4
        exit 1
    fi
    for ((i = 0; i < 300; i++)); do # until it has registered
        ctl cordon "$node" >/dev/null 2>&1 && break # the head does not train
        [ -e "$shared/failed" ] && over 4
        sleep 0.2
    done
    for file in etcd/tls/ca.pem etcd/tls/client.pem etcd/tls/client-key.pem cluster.key; do cp "$state/$file" "$shared/"; done
    touch "$shared/ready"
    local words code=5
    read -ra words <<<"$ARGS"
    if ! [ -e "$state/submitted" ]; then # else by a head before this one
        ctl run --detach --name "$job" --nodes "$MIN_NODES:$NODES" --checkpoints "$shared/checkpoints" "${words[@]}"
        touch "$state/submitted"
    fi
    until ctl logs -f --rank 0 "$job" 2>/dev/null; do sleep 1; done & # wherever that rank is
    until [ -e "$shared/failed" ] && ctl stop --discard "$job"; do sleep 1; done &
    while ((code == 5 || code == 6)); do # its elasticd or etcd has died: both are started again
        kill -0 "$keeper" 2>/dev/null || exit 1 # the next head goes on
        sleep 1
        code=0
        ctl wait "$job" &
        wait $! || code=$?
    done
    ((code != 1)) || code=4 # stopped by a user, or by `failed`: as final as a failure
    over "$code"
}

node() {
    for ((i = 0; i < 300; i++)); do # of a job before this one, until its head removes it
        [ -e "$shared/over" ] || break
        sleep 1
    done
    until [ -e "$shared/ready" ] || [ -e "$shared/over" ]; do sleep 0.5; done
    [ -e "$shared/over" ] && exit 0
    settings+=(--etcd "$head:$port" --set "cluster_key_file=$shared/cluster.key")
    settings+=(--set "etcd.ca_file=$shared/ca.pem" --set "etcd.cert_file=$shared/client.pem")
    settings+=(--set "etcd.key_file=$shared/client-key.pem")
    settings+=(--set etcd.allow_unsound_version=true) # it has this job only, which goes on without its data
    keep &
    local keeper=$!
    trap 'elasticd "${settings[@]}" --stop || true' EXIT
    # Eviction, kubectl drain, a taint: the job leaves this node at a step boundary.
    trap 'ctl drain "$node" --reason "the pod is being stopped" --deadline 90 --wait --timeout 100 || true; exit 143' TERM
    until ctl uncordon "$node" >/dev/null 2>&1; do # drained by the pod before this one
        kill -0 "$keeper" 2>/dev/null || exit 1
        sleep 0.5
    done
    while kill -0 "$keeper" 2>/dev/null; do
        [ -e "$shared/over" ] && exit 0
        sleep 1 &
        wait $! || true
    done
    exit 1
}

case ${1:-} in
head | node) "$1" ;;
*)
    echo "usage: pod.sh head|node" >&2
    exit 2
    ;;
esac
