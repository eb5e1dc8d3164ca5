"""Which threads wait inside a collective, by stacks as py-spy shows them."""

from __future__ import annotations

import pytest

from elastic.recovery.hangs.collective_frames import is_blocked_in_collective

HEAD = "Process 321: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
ALL_REDUCE = """\
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    train (train.py:20)
    <module> (train.py:40)
"""
LOOP = """\
    forward (train.py:12)
    _wrapped_call_impl (torch/nn/modules/module.py:1773)
    forward (torch/nn/parallel/distributed.py:1661)
    train (train.py:20)
"""


def dump(main: str, *others: str) -> str:
    threads = [f'Thread 321 (idle): "MainThread"\n{main}']
    threads += [f'Thread {400 + i} (idle): "elastic-monitor"\n{one}' for i, one in enumerate(others)]
    return HEAD + "".join(threads)


@pytest.mark.parametrize(
    "main",
    [
        ALL_REDUCE,
        "    __call__ (torch/_ops.py:1158)\n    wait_tensor (torch/distributed/_functional_collectives.py:132)\n"
        "    train (train.py:20)\n",
        "    _verify_param_shape_across_processes (torch/distributed/utils.py:294)\n"
        "    __init__ (torch/nn/parallel/distributed.py:1000)\n    train (train.py:20)\n",
        "    forward (torch/nn/parallel/distributed.py:1661)\n    train (train.py:20)\n",
        # the state on its way, over sockets without gloo
        "    recv_into (_socket.cpython-311-x86_64-linux-gnu.so)\n    wait (elastic/worker/comm/direct.py:125)\n"
        "    _receive (elastic/worker/state/handover/broadcast.py:210)\n    train (train.py:20)\n",
        "    wait (threading.py:327)\n    result (concurrent/futures/_base.py:451)\n"
        "    wait (elastic/worker/comm/direct.py:110)\n    _land (elastic/worker/state/handover/broadcast.py:180)\n",
        # work.wait() has no frame of its own in Python
        "    0x7efc8aea3f16 (libc.so.6)\n    pthread_cond_wait (libc.so.6)\n"
        "    std::condition_variable::wait (libstdc++.so.6.0.30)\n    c10d::Work::wait (libtorch_cpu.so)\n"
        "    pybind11::cpp_function::dispatcher (libtorch_python.so)\n    train (train.py:20)\n",
        "    epoll_wait (libc.so.6)\n    gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)\n"
        "    train (train.py:20)\n",
    ],
)
def test_a_witness(main: str) -> None:
    assert is_blocked_in_collective(dump(main))
    assert is_blocked_in_collective(dump(main, LOOP))
    assert is_blocked_in_collective(HEAD + "Thread 0x7F00 (idle)\n" + main)  # without names the first is the main one


@pytest.mark.parametrize(
    "main",
    [
        LOOP,
        "    to (torch/distributed/utils.py:120)\n    _to_kwargs (torch/distributed/utils.py:150)\n"
        "    forward (torch/nn/parallel/distributed.py:1661)\n    train (train.py:20)\n",
        "    read (train.py:7)\n    reduce (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py:20)\n",
        "    write (torch/distributed/checkpoint/filesystem.py:300)\n    save (train.py:9)\n",
        "    __pickle__ (train.py:3)\n" + ALL_REDUCE,
        "    clock_nanosleep (libc.so.6)\n    train (train.py:20)\n" + ALL_REDUCE,
        "    train (my/torch/distributed.py:20)\n",
        "    digest (elastic/worker/state/handover/broadcast.py:250)\n"
        "    _receive (elastic/worker/state/handover/broadcast.py:210)\n",
        "    wait (threading.py:327)\n    result (concurrent/futures/_base.py:451)\n    train (train.py:20)\n",
    ],
)
def test_not_a_witness(main: str) -> None:
    assert not is_blocked_in_collective(dump(main))
    assert not is_blocked_in_collective(dump(main, ALL_REDUCE))


@pytest.mark.parametrize("said", ["", "no stack could be read", "py-spy is not installed", HEAD])
def test_nothing_to_read_clears_nobody(said: str) -> None:
    assert not is_blocked_in_collective(said)
