"""The table of rules by which an incident is classified: what failed, and what to do about it. Data only.

The first rule that matches decides, so a rule stands above every other one that would match in its place with a less
specific answer. `says` is searched in the error's message, in the failure report and in the exception that the log
ends with; `logs` in the last lines of the log of a worker that died of a signal other than SIGKILL; `stacks` in the
stacks of a hung process. All of them are regular expressions, and a rule that gives several matches if one is found.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic.contract.records.reasons import Code


class Class(enum.StrEnum):
    USER_CODE = "user code"
    NUMERICS = "numerics"
    MEMORY = "out of memory"
    GPU = "GPU"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    ETCD = "etcd"
    HANG = "hang"
    PLANNED = "planned"
    LIMIT = "limit"
    ENVIRONMENT = "environment"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    cls: Class
    what: str
    """What failed, as the predicate of a headline: 'rank 1 on n1: <what>'."""
    fix: str
    """What to do if it is to be prevented, or if the job did not recover."""
    kinds: tuple[str, ...] = ()
    """Kinds of incidents (see IncidentRecord) that it applies to; empty: any."""
    signal: str = ""
    """The signal that ended the process, or a SIGTERM that its script has turned into an exit code."""
    codes: tuple[Code, ...] = ()
    """Reasons that elasticd itself has given."""
    exceptions: tuple[str, ...] = ()
    """Types of elastic's own exceptions."""
    says: str = ""
    logs: str = ""
    stacks: str = ""
    misuse: bool = False
    """For what elastic has refused in a script alone (WorkerError.misuse)."""
    person: bool = False
    """It stays as it is until a person acts, although the job goes on."""


NOTHING = "nothing to do: this was requested"
_HANG, _COMM, _GONE = ("hang",), ("comm", "form"), ("lost", "unreachable")
_PLANNED = ("planned", "drain")
_AGAIN = (
    "elasticctl restart JOB does what follows training once more: it goes on from the checkpoint of the last step, and "
    "trains again if there is none"
)

RULES = (
    # Elastic refuses it as misuse, but not the script is wrong.
    Rule("interface", Class.ENVIRONMENT, "a variable names a network interface that its node does not have",
         says=r"SOCKET_IFNAME=",
         fix="submit the job again with the name of an interface that all nodes have, or without the variable: it is "
              "then that of each node's address"),
    Rule("misuse", Class.USER_CODE, "the script does what elastic refuses", misuse=True,
         fix="the message says what to write instead; correct the script, and submit it again"),
    # ── planned ─────────────────────────────────────────────────────────────────────────────────────────────
    Rule("gpu_drained", Class.GPU, "its node was drained because a GPU is faulty", kinds=_PLANNED,
         codes=(Code.GPU_FAULTY,),
         fix="reset or replace the GPU that is named; then restart elasticd on the node"),
    Rule("unhealthy", Class.NODE, "its node was drained by a health check", kinds=_PLANNED, codes=(Code.HEALTH_CHECK,),
         fix="fix what the check names; the node takes work again once the check has nothing to say"),
    Rule("excluded", Class.NODE, "the job left a node on which its workers fail more often, or cannot be started",
         kinds=_PLANNED, codes=(Code.EXCLUDED,),
         fix="compare that node with the others: elasticctl incidents; elasticctl uncordon NODE uses it again"),
    Rule("preempted", Class.PLANNED, "its node is being taken away (elasticd --stop, SIGTERM, or a reclaimed instance)",
         kinds=_PLANNED,
         codes=(Code.AGENT_ENDED, Code.TAKEN_AWAY, Code.SHUTS_DOWN), says=r"(?i)\bspot\b|preempt|reclaim",
         fix="nothing to do while enough nodes are left; otherwise add a node"),
    Rule("scaled_down", Class.PLANNED, "the job gave up a node that it may no longer have", kinds=_PLANNED,
         codes=(Code.SURPLUS,), fix=NOTHING),
    Rule("joined", Class.PLANNED, "a node joined the job", kinds=("planned",), codes=(Code.JOINS,),
         fix="nothing to do: the job grew"),
    Rule("left", Class.PLANNED, "a node was drained", kinds=_PLANNED, codes=(Code.LEAVES,), fix=NOTHING),
    Rule("drained", Class.PLANNED, "a node was drained", kinds=("drain",), fix=NOTHING),
    Rule("boundary", Class.PLANNED, "a failure just before the step at which nodes were to leave", kinds=("boundary",),
         fix="see the other causes; the nodes that leave hand their state over first"),
    Rule("called_off", Class.PLANNED, "a drain was called off", kinds=("undrain",), fix=NOTHING),
    Rule("planned", Class.PLANNED, "the membership changed as planned", kinds=_PLANNED, fix=NOTHING),
    # ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────
    Rule("diverged", Class.NUMERICS, "its replica of the state differs from the others", kinds=("drift",),
         fix="suspect that rank's GPU or memory if it is always the same node; else a parameter that is changed "
              "outside of the optimizer, or code that differs by rank"),
    Rule("bad_loss", Class.NUMERICS, "the loss is not a finite number", kinds=("bad loss", "nan", "inf", "loss"),
         fix="lower the learning rate, clip the gradients or check the samples of that step; "
              "on_bad_numbers = 'rollback' goes back to the last snapshot by itself"),
    # ── etcd ────────────────────────────────────────────────────────────────────────────────────────────────
    Rule("etcd_no_space", Class.ETCD, "etcd is out of space and takes no writes",
         says=r"(?i)mvcc: database space exceeded|alarm:? ?\(?NOSPACE|etcd.*NOSPACE",
         fix="compact and defragment etcd or raise its --quota-backend-bytes, then: etcdctl alarm disarm"),
    Rule("etcd_refused", Class.ETCD, "etcd refused the login or the certificate",
         says=r"(?i)etcdserver: (authentication|permission|invalid auth|user name)|"
              r"etcd\b.*(authentication failed|permission denied|invalid user name or password|certificate|handshake)",
         fix="check etcd.user and etcd.password_file, and the certificates, on the node that is named"),
    Rule("etcd_unavailable", Class.ETCD, "etcd was unavailable", says=r"(?i)etcdserver: |\bEtcdUnavailable\b",
         fix="bring etcd back (a majority of its members; if some are lost for good: docs/etcd.md); what trains goes "
              "on meanwhile, and the recovery follows by itself"),
    # ── what a node lacks ───────────────────────────────────────────────────────────────────────────────────
    Rule("shortage", Class.LIMIT, "its node lacks what a worker needs to be started", kinds=("shortage",),
         fix="raise what is named there: LimitNOFILE, TasksMax, memory, or space on the disk of the job's folder; the "
              "node is tried again, and another one is taken if there is one"),
    # ── storage ─────────────────────────────────────────────────────────────────────────────────────────────
    Rule("shm_full", Class.MEMORY, "shared memory (/dev/shm) is full",
         says=r"(?i)out of shared memory|insufficient shared memory|bus error|"
              r"(no space left|unable to (open|write|mmap|resize)).*(/dev/shm|shared memory|torch_\d)|"
              r"/dev/shm.*no space left|no space left on device: '/?(psm_|pymp-|sem\.)",
         logs=r"(?i)out of shared memory|insufficient shared memory",
         fix="enlarge /dev/shm (container: --shm-size or an emptyDir of medium Memory), or use fewer DataLoader "
              "workers"),
    Rule("disk_full", Class.STORAGE, "a disk or a quota is full",
         says=r"(?i)no space left on device|errno 28\b|ENOSPC|disk quota exceeded|errno 122\b",
         logs=r"(?i)no space left on device|disk quota exceeded",
         fix="free space on the file system that is named (df -h; old checkpoints: checkpoint.keep); where none is, "
              "look at /dev/shm, too"),
    Rule("read_only", Class.STORAGE, "a file system is read-only",
         says=r"(?i)read-only file system|errno 30\b|EROFS",
         fix="look for disk errors (dmesg) and remount it read-write, or name another folder"),
    Rule("stale_mount", Class.STORAGE, "a network file system lost the file",
         says=r"(?i)stale (nfs )?file handle|errno 116\b|transport endpoint is not connected|errno 107\b",
         fix="remount the network file system on that node"),
    Rule("io_error", Class.STORAGE, "the disk reported an I/O error",
         says=r"(?i)input/output error|errno 5\b|\bEIO\b",
         fix="look at dmesg and SMART on that node; elasticctl drain NODE takes the job off it"),
    Rule("permission", Class.STORAGE, "permission denied",
         says=r"(?i)permission ?(denied|error)|errno 13\b|operation not permitted(?! when)|errno 1\b",
         fix="give the job's user access to the path that is named"),
    Rule("checkpoint_damaged", Class.STORAGE, "a checkpoint is damaged",
         exceptions=("NoGoodCheckpoint", "Damaged"),
         says=r"(?i)checkpoint.*corrupt|checksum|SafetensorError|HeaderTooLarge|PytorchStreamReader failed|"
              r"failed finding central directory",
         fix="elasticctl checkpoint verify JOB names the damaged ones; quarantined ones are never loaded; look at "
              "the disk"),
    Rule("no_state", Class.STORAGE, "no rank found a state to resume from", kinds=("no-state",),
         fix="mount the checkpoint folder on every node (checkpoint.dir), or submit again without it to start from 0"),
    # ── GPU ─────────────────────────────────────────────────────────────────────────────────────────────────
    Rule("gpu_memory", Class.MEMORY, "out of GPU memory",
         says=r"(?i)cuda out of memory|torch\.(cuda\.)?OutOfMemoryError|cuda error: out of memory|hip out of memory|"
              r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
         fix="use a smaller batch or activation checkpointing; check with nvidia-smi that no other process holds "
              "memory of that GPU"),
    Rule("gpu_lost", Class.GPU, "a GPU has fallen off the bus",
         says=r"(?i)fallen off the bus|gpu is lost|GpuIsLost|xid\b[^,\n]{0,30}[ :]79\b|no cuda-capable device|"
              r"cuda error: (unknown error|.*device.*unavailable|system not yet init)",
         logs=r"(?i)fallen off the bus|gpu is lost|xid\b[^,\n]{0,30}[ :]79\b",
         fix="elasticctl drain NODE, then reset or replace the GPU (dmesg | grep -i xid)"),
    Rule("gpu_memory_error", Class.GPU, "a GPU has memory errors (ECC)",
         says=r"(?i)uncorrectable (ecc|memory)|ecc error|xid\b[^,\n]{0,30}[ :](48|63|64|94|95|140)\b",
         logs=r"(?i)uncorrectable ecc|xid\b[^,\n]{0,30}[ :](48|63|64|94|95|140)\b",
         fix="elasticctl drain NODE, then reset the GPU; replace it if this occurs again"),
    Rule("gpu_fault", Class.GPU, "the driver reported a GPU error (XID)",
         says=r"(?i)\bxid\b[^,\n]{0,30}[ :]\d+|nvlink error",
         logs=r"(?i)NVRM: xid\b[^,\n]{0,30}[ :]\d+",
         fix="look the XID up in NVIDIA's list; drain the node if it occurs again on the same GPU"),
    Rule("driver", Class.ENVIRONMENT, "the GPU driver does not fit",
         says=r"(?i)driver version is insufficient|driver/library version mismatch|forward compatibility was attempted|"
              r"no kernel image is available|Found no NVIDIA driver",
         fix="install the same driver on every node, and a torch that is built for it; reboot after an upgrade"),
    Rule("device_assert", Class.USER_CODE, "a device-side assertion failed: mostly an index out of range",
         says=r"(?i)device-side assert",
         fix="run once with CUDA_LAUNCH_BLOCKING=1 to see the line; look for labels or token ids out of range"),
    Rule("cuda_error", Class.GPU, "a CUDA kernel failed",
         says=r"(?i)illegal memory access|misaligned address|CUDA error: |CUBLAS_STATUS_|CUDNN_STATUS_|"
              r"unspecified launch failure",
         fix="if it is always the same GPU, drain its node; else run once with CUDA_LAUNCH_BLOCKING=1 to find the "
              "kernel"),
    # ── host memory and limits ──────────────────────────────────────────────────────────────────────────────
    Rule("host_memory", Class.MEMORY, "killed by the kernel: out of host memory",
         codes=(Code.OOM_KILLED,), says=r"(?i)oom-kill|cgroup out of memory",
         fix="use fewer DataLoader workers or less caching, or raise the job's memory limit; memory per rank: "
              "elasticctl status JOB"),
    Rule("dataloader_killed", Class.MEMORY, "a DataLoader worker process was killed, most probably for lack of memory",
         says=r"(?i)DataLoader worker.*signal: killed",
         fix="use fewer DataLoader workers or less caching, or raise the job's memory limit"),
    Rule("allocation", Class.MEMORY, "an allocation of host memory failed",
         says=r"\bMemoryError\b|(?i:cannot allocate memory|errno 12\b|std::bad_alloc|can't allocate memory)",
         logs=r"std::bad_alloc|(?i:cannot allocate memory)",
         fix="use less memory per process, or raise the limit (ulimit -v, the unit's MemoryMax)"),
    Rule("open_files", Class.LIMIT, "too many open files",
         says=r"(?i)too many open files|errno 24\b|received 0 items of ancdata",
         fix="raise LimitNOFILE, close files in the data set, or "
              "torch.multiprocessing.set_sharing_strategy('file_system')"),
    Rule("processes", Class.LIMIT, "no further process or thread can be started",
         says=r"(?i)can't start new thread|resource temporarily unavailable|errno 11\b|pthread_create failed",
         logs=r"(?i)can't start new thread|pthread_create failed",
         fix="raise the limit (ulimit -u, TasksMax), or use fewer threads: OMP_NUM_THREADS, num_workers"),
    # ── network ─────────────────────────────────────────────────────────────────────────────────────────────
    Rule("store_altered", Class.NETWORK, "a host without the job's secret wrote into the store where ranks meet",
         kinds=("store",), codes=(Code.STORE_ALTERED,),
         fix="find the host that reaches the ports of the nodes, and close them with a firewall (docs/security.md): "
              "the value was refused, but gloo and NCCL do not know a stranger"),
    Rule("store_overfull", Class.NETWORK, "the store where ranks meet was filled beyond its limit, and closed",
         kinds=("store",),
         fix="if the script keeps large values there, use a collective or a file; else a host that is no node reaches "
              "the ports of the nodes: close them with a firewall (docs/security.md)"),
    Rule("loopback", Class.NETWORK, "a rank announced a loopback address to the other nodes",
         kinds=(*_COMM, "exit"), says=r"(?i)(remote|connect\w*|address|peer)\W*\[?(127\.\d+\.\d+\.\d+|::1)\b",
         fix="set `interface` in elasticd.toml of that node, and remove its host name from the 127.0.1.1 line of "
              "/etc/hosts"),
    Rule("name_resolution", Class.NETWORK, "a host name could not be resolved", codes=(Code.STORE_UNKNOWN,),
         says=r"(?i)name or service not known|temporary failure in name resolution|gaierror|"
              r"no address associated with hostname|nodename nor servname",
         fix="check DNS or /etc/hosts of that node, or set `address` to an IP address"),
    Rule("nccl_timeout", Class.NETWORK, "a NCCL collective timed out",
         says=r"(?i)watchdog caught collective|collective operation timeout|nccl.*(timed out|timeout)",
         logs=r"(?i)watchdog caught collective|collective operation timeout",
         fix="find the rank that came late: its last log lines and stacks; check the links with "
              "NCCL_DEBUG=INFO"),
    Rule("nccl_remote", Class.NETWORK, "NCCL lost the connection to another rank",
         says=r"(?i)ncclRemoteError|remote process exited or there was a network error",
         logs=r"ncclRemoteError",
         fix="a rank that died earlier is the cause, if one is listed; else check the links and switches"),
    Rule("nccl_error", Class.NETWORK, "NCCL failed",
         says=r"(?i)ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclInvalid|nccl error",
         logs=r"ncclSystemError|ncclInternalError",
         fix="run once with NCCL_DEBUG=INFO; check NCCL_SOCKET_IFNAME, the links, and that all nodes have one NCCL "
              "version"),
    Rule("port_in_use", Class.NETWORK, "a port is already in use",
         says=r"(?i)address already in use|EADDRINUSE|errno 98\b",
         fix="end the other process (ss -ltnp), or let the script take a free port: port 0"),
    Rule("tls", Class.NETWORK, "a TLS certificate was refused",
         says=r"(?i)certificate verify failed|CERTIFICATE_VERIFY_FAILED|ssl.*handshake",
         fix="install the certificate authority on that node, and check its clock"),
    Rule("no_route", Class.NETWORK, "a host cannot be reached",
         says=r"(?i)no route to host|network is unreachable|errno 11[3]\b|errno 101\b|host is unreachable",
         fix="check routes and firewalls between the nodes that are named"),
    Rule("refused", Class.NETWORK, "a connection was refused", kinds=(*_COMM, "exit"),
         says=r"(?i)connection refused|ECONNREFUSED|errno 111\b",
         fix="nothing listens there, or a firewall rejects: check that the process at that address runs"),
    Rule("late_rank", Class.NETWORK, "the group did not form in time", kinds=(*_COMM, "exit"),
         codes=(Code.RANKS_MISSING, Code.NO_STORE, Code.NOT_FORMING),
         says=r"(?i)timed out waiting|init_process_group|store.*timed? ?out|wait timeout after",
         fix="find the rank that did not come: elasticctl status JOB; raise timeouts.form_s if set-up is slow"),
    Rule("reset", Class.NETWORK, "a connection between ranks was closed", kinds=(*_COMM, "exit"),
         says=r"(?i)connection (reset|closed) by peer|broken pipe|ECONNRESET|errno 104\b|socket closed|"
              r"connection (was )?(closed|aborted)",
         fix="no death was reported, so the network is the probable cause: check links and switches if it occurs "
              "again"),
    Rule("net_timeout", Class.NETWORK, "a connection timed out", kinds=(*_COMM, "exit"),
         says=r"(?i)connection timed out|ETIMEDOUT|errno 110\b|read timed out", codes=(Code.WAITED,),
         fix="check links and firewalls between the nodes of the job: packets are lost"),
    Rule("unreachable", Class.NETWORK, "the other nodes cannot reach it", kinds=("unreachable",),
         fix="check the link and the firewall of that node; it is taken back once it answers again"),
    # ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────
    Rule("lease_expired", Class.NODE, "its node is down, frozen or cut off", kinds=_GONE,
         codes=(Code.LEASE_EXPIRED,),
         fix="check power and network of that node; it is taken back by itself"),
    Rule("agent_replaced", Class.NODE, "its agent was restarted", kinds=_GONE, codes=(Code.AGENT_RESTARTED,),
         fix="agent.log of the job on that node has the reason; oom or a reboot are the usual ones"),
    Rule("node_down", Class.NODE, "its agent has ended, or its node is down", kinds=_GONE,
         codes=(Code.PORT_REFUSES,),
         fix="if the node was not rebooted, agent.log and the journal on it have the reason"),
    Rule("node_lost", Class.NODE, "its node was lost", kinds=_GONE, fix="check that node; it is taken back by itself"),
    # ── hangs ───────────────────────────────────────────────────────────────────────────────────────────────
    Rule("stopped", Class.HANG, "its process was stopped by a signal (SIGSTOP, SIGTSTP)", kinds=(*_HANG, "respawn"),
         codes=(Code.STOPPED,),
         fix="nothing to do: it was replaced; find out what stops processes if it occurs again"),
    Rule("hang_io", Class.HANG, "it hung in uninterruptible I/O", kinds=_HANG,
         codes=(Code.IN_IO,),
         stacks=r"(?m)^\s*(__libc_)?(pread64|pwrite64|fsync|fdatasync|openat?|stat)\b.*\((libc|.*libc)",
         fix="a disk or a network file system does not answer on that node: dmesg, mount, df"),
    Rule("hang_interpreter", Class.HANG, "a call held the Python interpreter", kinds=_HANG, codes=(Code.DEAF,),
         fix="the stack names the call: a C extension that does not release the GIL, or a deadlock in it"),
    Rule("hang_data", Class.HANG, "its data loader gave no batch", kinds=_HANG,
         stacks=r"dataloader\.py|_try_get_data|_next_data|/datasets?/|webdataset|torch/utils/data",
         fix="look at the data source of that node and at `dataset[i]`; set DataLoader's timeout"),
    Rule("hang_collective", Class.HANG, "it waited in a collective that the other ranks did not enter", kinds=_HANG,
         stacks=r"distributed_c10d\.py|all_reduce|allreduce|broadcast\b|barrier|all_gather",
         fix="collectives must be called by all ranks in the same order: look for one that depends on the rank"),
    Rule("hang_lock", Class.HANG, "it waited for a lock", kinds=_HANG,
         stacks=r"threading\.py|\bacquire\b|acquire_lock|\block\b|futex|pthread_cond|queue\.py|sem_wait",
         fix="the stack names the lock; a deadlock after a fork is frequent: start threads after setup"),
    Rule("hang_sleep", Class.HANG, "it slept or waited for another process", kinds=_HANG,
         stacks=r"nanosleep|\bsleep\b|subprocess\.py|waitpid|selectors\.py|socket\.py|urllib|requests/|"
                r"(?m:^\s*(__libc_)?(read|write|recv\w*|send\w*|poll|wait4)\b.*\((libc|.*libc))",
         fix="the stack names the call: give it a timeout, or declare the span with job.quiet"),
    Rule("hang", Class.HANG, "it made no progress while other ranks waited for it", kinds=_HANG,
         fix="the stack shows where; declare long spans without a step with job.quiet"),
    Rule("late_abort", Class.HANG, "it did not leave its group in time, and was replaced", kinds=("respawn",),
         fix="nothing to do; raise timeouts.abort_s if steps are long"),
    Rule("killed_late", Class.NODE, "it was killed after training was complete, before its script had ended",
         kinds=("late exit",), signal="SIGKILL", fix=_AGAIN),
    Rule("failed_late", Class.USER_CODE, "its script failed after training was complete", kinds=("late exit",),
         codes=(Code.FAILED_LATE,), fix=_AGAIN),
    Rule("late_exit", Class.HANG, "its process outlived its script and was killed", kinds=("late exit",),
         fix="training was complete; end threads and executors of the script, or raise exit_timeout_s"),
    Rule("idle", Class.UNKNOWN, "its worker left the group though nothing had failed", kinds=("idle",),
         fix="nothing to do: the group was formed again"),
    # ── user code ───────────────────────────────────────────────────────────────────────────────────────────
    Rule("dataloader_worker", Class.USER_CODE, "a DataLoader worker process died",
         says=r"(?i)DataLoader worker \(pid.*(exited|killed|terminat)|Caught \w+ in DataLoader worker",
         fix="the exception above it is of the data set; without one it was killed: check memory"),
    Rule("missing_module", Class.ENVIRONMENT, "a Python module is missing",
         says=r"ModuleNotFoundError|No module named",
         fix="install it for the job's interpreter on every node, or set python to another one"),
    Rule("wrong_version", Class.ENVIRONMENT, "a module or library of another version or build",
         says=r"cannot import name|undefined symbol|GLIBC\w*_\d|version .* not found|protocol \d+, this elasticd|"
              r"(?i:incompatible .*version|requires? (torch|python|numpy|cuda)\b|version mismatch)|ImportError|"
              r"module '\w+' has no attribute",
         fix="install the same versions on every node"),
    Rule("syntax", Class.USER_CODE, "the script cannot be compiled", says=r"\b(Syntax|Indentation|Tab)Error\b",
         fix="fix the line that is named, and submit again"),
    Rule("no_file", Class.USER_CODE, "a file is missing",
         says=r"FileNotFoundError|(?i:no such file or directory|errno 2\b|can't open file)|NotADirectoryError",
         fix="the path must exist on every node: a shared file system, or a copy on each"),
    Rule("state_dict", Class.USER_CODE, "the saved state does not fit the model",
         says=r"Error\(s\) in loading state_dict|(?i:(missing|unexpected) key\(s\)|size mismatch for)",
         fix="use the model that the checkpoint was made with, or a new checkpoint folder"),
    Rule("unused_parameters", Class.USER_CODE, "a parameter took no part in the loss on some rank",
         says=r"(?i)expected to have finished reduction|find_unused_parameters|marked as ready twice|"
              r"parameters? (that )?(was|were) not used",
         fix="job.ddp(model, find_unused_parameters=True), or use every parameter in every step"),
    Rule("assertion", Class.USER_CODE, "an assertion failed", says=r"\bAssertionError\b",
         fix="the traceback names the line: fix the script or its data"),
    Rule("interrupted", Class.PLANNED, "interrupted from the keyboard", signal="SIGINT", says=r"KeyboardInterrupt",
         fix="nothing to do: it was interrupted by SIGINT"),
    Rule("early_end", Class.USER_CODE, "the script ended before the job was done",
         codes=(Code.ENDED_EARLY,),
         fix="look for a return or sys.exit() in train; all ranks must take the same number of steps"),
    Rule("unbound", Class.USER_CODE, "a variable of the script has no value there", says=r"\bUnboundLocalError\b",
         fix="train is entered again after a failure, where its loop may already be done: give the variable a value "
              "before the loop, or keep it in the State; then submit again"),
    Rule("python", Class.USER_CODE, "an exception in the script",
         says=r"(?m)^(\w+\.)*[A-Z]\w*(Error|Exception|Warning|Iteration|Exit|Failure|Refused)\b|^File \"",
         fix="the traceback names the line: fix the script, and submit again if the job has failed"),
    # ── what is left of exits ───────────────────────────────────────────────────────────────────────────────
    Rule("never_started", Class.ENVIRONMENT, "its process could not be started",
         codes=(Code.ZYGOTE_DIES, Code.NOT_STARTED, Code.ENDED_UNSTARTED),
         fix="zygote.log in the job's log folder on that node has the reason"),
    Rule("unreadable", Class.ENVIRONMENT, "its agent could not read a message of it, and ended it",
         codes=(Code.UNREADABLE,),
         fix="install one version of elasticd in the job's Python and the node's; if they are equal, native code in "
              "the script may have overwritten memory"),
    Rule("sigkill", Class.NODE, "killed by SIGKILL from outside", signal="SIGKILL",
         fix="nothing to do if an operator did it; else ask what kills processes on that node: a cgroup limit, "
              "earlyoom, a batch system (journalctl -k)"),
    Rule("sigterm", Class.NODE, "ended by SIGTERM from outside", signal="SIGTERM",
         fix="nothing to do if an operator did it (a job is stopped by elasticctl stop JOB); else find out what sends "
              "it on that node: a batch system, a supervisor, the script itself"),
    Rule("sigsegv", Class.USER_CODE, "segmentation fault (SIGSEGV) in native code", signal="SIGSEGV",
         fix="the log's faulthandler stack names the library; if it is always one node, suspect its memory: drain it"),
    Rule("sigbus", Class.MEMORY, "bus error (SIGBUS): mostly /dev/shm is full, or a mapped file was truncated",
         signal="SIGBUS",
         fix="enlarge /dev/shm, or use fewer DataLoader workers"),
    Rule("unlike_sizes", Class.USER_CODE, "ranks passed tensors of different sizes to a collective", kinds=("exit",),
         logs=r"distributed collective mismatch|op\.preamble\.length",
         fix="all ranks must pass the same size: pad, use job.gather, or leave out a last batch that is smaller"),
    Rule("sigabrt", Class.USER_CODE, "aborted (SIGABRT) by a library", signal="SIGABRT",
         fix="the last lines of the log name the library and the reason"),
    Rule("sigill", Class.ENVIRONMENT, "illegal instruction (SIGILL): a build for another CPU", signal="SIGILL",
         fix="install a build for the CPU of that node, or exclude the node: elasticctl cordon NODE"),
    Rule("sigfpe", Class.USER_CODE, "arithmetic error (SIGFPE) in native code", signal="SIGFPE",
         fix="the log's faulthandler stack names the library"),
    Rule("signal", Class.NODE, "killed by a signal from outside", codes=(Code.KILLED,),
         fix="find out what sends that signal on that node"),
    Rule("checkpoint_stray", Class.STORAGE, "a node has a checkpoint that the job goes on without",
         kinds=("checkpoint",), codes=(Code.STRAY_CHECKPOINT,),
         fix="keep it if its steps are wanted: stop the job and start it again with that node; else move it away"),
    Rule("checkpoint_folder_apart", Class.STORAGE, "the job has no checkpoints: its folder is not shared",
         kinds=("checkpoint",), codes=(Code.FOLDER_APART,), person=True,
         fix="mount the folder on all nodes, or submit again with checkpoint.shared = false: none is written now"),
    Rule("checkpoint", Class.STORAGE, "a checkpoint could not be written", kinds=("checkpoint",),
         fix="training goes on, and the one before stays: check the checkpoint folder if it occurs again"),
    Rule("exit_code", Class.USER_CODE, "the script ended with an error code",
         codes=(Code.EXITED,),
         fix="the last lines of its log tell why: elasticctl logs JOB"),
    Rule("collective", Class.NETWORK, "a collective failed, and no agent reported a cause", kinds=_COMM,
         fix="check the network if it occurs again; the script may also have closed a connection"),
    Rule("unknown", Class.UNKNOWN, "no rule knows this failure", fix="see the evidence, agent.log and the job's log"),
)  # fmt: skip
