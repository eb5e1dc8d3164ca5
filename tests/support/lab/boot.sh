#!/bin/bash
# Boots a real systemd as PID 1 of fresh namespaces over an overlay of / : what it writes lands in a tmpfs and is gone
# with it. Called by support/lab.py with, in the environment:
#   WORK    a folder of its own: WORK/share is /mnt inside, WORK/console.log its console
#   CGROUP  its control group (v2), which exists already
#   NAME    its host name
#   SHOW    folders that must be seen inside at the same path, though they lie on other file systems or below /tmp
set -eu
mkdir -p "$WORK/up" "$WORK/root" "$WORK/share"
: >"$WORK/console.log"
echo 0 >"$CGROUP/cgroup.procs"
exec unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup bash -euc '
  mount --make-rprivate /
  mount -t tmpfs tmpfs "$WORK/up"; mkdir "$WORK/up/u" "$WORK/up/w"
  R=$WORK/root
  mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/up/u,workdir=$WORK/up/w" "$R"
  mount -t proc proc "$R/proc"
  mount --bind "$R/proc/sys" "$R/proc/sys"; mount -o remount,bind,ro "$R/proc/sys"   # one kernel: no sysctl from inside
  mount -t sysfs -o ro sysfs "$R/sys"
  mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
  mount -t tmpfs -o mode=755 tmpfs "$R/dev"
  for d in null zero full random urandom tty; do touch "$R/dev/$d"; mount --bind "/dev/$d" "$R/dev/$d"; done
  mkdir "$R/dev/pts" "$R/dev/shm"
  mount -t devpts devpts "$R/dev/pts" -o newinstance,ptmxmode=0666; ln -s pts/ptmx "$R/dev/ptmx"
  ln -s /proc/self/fd "$R/dev/fd"; ln -s fd/0 "$R/dev/stdin"; ln -s fd/1 "$R/dev/stdout"; ln -s fd/2 "$R/dev/stderr"
  touch "$R/dev/console"; mount --bind "$WORK/console.log" "$R/dev/console"
  mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
  mount -t tmpfs -o mode=755 tmpfs "$R/run"
  for d in tmp var/tmp; do mount -t tmpfs -o mode=1777 tmpfs "$R/$d"; done  # else tidying walks the outer /tmp: seconds
  mount --bind "$WORK/share" "$R/mnt"
  for d in $SHOW; do mkdir -p "$R$d"; mount --rbind "$d" "$R$d"; done
  echo "$NAME" >"$R/etc/hostname"; hostname "$NAME"; ip link set lo up
  # only what we name is started
  rm -f "$R"/etc/systemd/system/*.wants/*
  for u in systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-modules-load.service \
    systemd-sysctl.service systemd-journald-audit.socket systemd-remount-fs.service systemd-sysusers.service \
    systemd-logind.service getty.target console-getty.service systemd-update-utmp.service systemd-timesyncd.service \
    systemd-update-utmp-runlevel.service systemd-firstboot.service sys-fs-fuse-connections.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount dev-hugepages.mount dev-mqueue.mount \
    proc-sys-fs-binfmt_misc.automount systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer \
    systemd-binfmt.service systemd-pstore.service systemd-random-seed.service systemd-machine-id-commit.service \
    systemd-hwdb-update.service ldconfig.service apt-daily.timer apt-daily-upgrade.timer man-db.timer; do
    ln -sf /dev/null "$R/etc/systemd/system/$u"
  done
  mkdir -p "$R/.old"; cd "$R"; pivot_root . .old; umount -l /.old
  mount --make-rshared /                                                    # LoadCredential= needs it
  exec env -i container=elasticd-ci PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --log-level=info --show-status=no
'
