"""A processor compromised by a hostile file: an item's options select the attack, its header has the result.

Loaded by the fork server as `taken_over_processor:build_processor`.
"""

import ctypes
import fcntl
import importlib
import inspect
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from medialane.prepare import ProcessedItem
from medialane.testing.fake_processor import FakeProcessor

#: A module that nothing has loaded.
LATE = "zipapp"

libc = ctypes.CDLL(None, use_errno=True)


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def call(number, *arguments):
    return checked(libc.syscall(ctypes.c_long(number), *arguments))


def arena_mapping():
    """Address of this process's mapping of the arena. A fork of the tests' process has those of that, too, also of
    arenas of earlier tests: writable ones, which a store's forks, made before its arena, do not have."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if ".arena" in line]
    own = next((line for line in found if line.split()[1].startswith("r--")), found[0])
    return int(own.partition("-")[0], 16)


def write_arena(at):
    ctypes.memset(arena_mapping() + at, 0xEE, 64)


def make_arena_writable():
    checked(libc.mprotect(ctypes.c_void_p(arena_mapping()), ctypes.c_size_t(1 << 20), 3))


def remove_arena_pages():
    checked(libc.madvise(ctypes.c_void_p(arena_mapping()), ctypes.c_size_t(1 << 20), 9))


def write_memory_of(pid):
    data = ctypes.create_string_buffer(b"x" * 8)
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(data), 8)
    theirs = (ctypes.c_size_t * 2)(0x1000, 8)
    checked(libc.process_vm_writev(pid, ours, 1, theirs, 1, 0))


def own_signals(pid):
    """Have the kernel signal another process when a pipe becomes readable."""
    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, pid)


def start_thread():
    ran = []
    thread = threading.Thread(target=lambda: ran.append(1))
    thread.start()
    thread.join()
    assert ran


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def import_late():
    assert LATE not in sys.modules
    importlib.import_module(LATE)


def state():
    """What of this process is not seen from outside."""
    handlers = {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
    return {"environment": dict(os.environ), "handlers": handlers}


def send_report(report):
    """Send any message to the store, and wait to be killed."""
    (jobs,) = (fd for fd in range(3, 256) if is_socket(fd))
    body = msgspec.msgpack.encode(report)
    os.write(jobs, len(body).to_bytes(4, "big"))
    while body:
        body = body[os.write(jobs, body) :]
    signal.pause()


def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def report_shape(num_dimensions, dimension):
    spec = {"dtype": "uint8", "shape": [dimension] * num_dimensions}
    send_report(need_range([spec], [4096]))


def report_tensors(num_tensors):
    send_report(need_range([{"dtype": "uint8", "shape": [1]}] * num_tensors, [1] * num_tensors))


def report_addresses(addresses):
    send_report(need_range([{"dtype": "uint8", "shape": [1]}] * 2, addresses))


def report_header(num_bytes):
    send_report(need_range([], []) | {"header": bytes(num_bytes), "unknown": [[]] * 100_000})


def report_durations(seconds):
    threading.Timer(0.2, die).start()
    send_report(need_range([], []) | {"header": b"{}", "decode_s": float(seconds), "process_s": float(seconds)})


def report_error(code, message):
    report = {"code": code, "message": message, "param": "secret", "retry_after_s": 10**9}
    send_report({"type": "JobFailed", "job_id": current_job(), "report": report})


def current_job():
    frame = inspect.currentframe()
    while "job" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["job"].job_id


def need_range(specs, addresses):
    times = {"decode_s": 0.0, "process_s": 0.0}
    return {
        "type": "NeedRange",
        "job_id": current_job(),
        "specs": specs,
        "addresses": addresses,
        "header": b"",
        "size": {},
        **times,
    }


ATTACKS = {
    "report shape": report_shape,
    "report tensors": report_tensors,
    "report addresses": report_addresses,
    "report header": report_header,
    "report durations": report_durations,
    "report error": report_error,
    "tcp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "tcp6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "unix": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "socketpair": socket.socketpair,
    "connect": lambda fd: checked(libc.connect(fd, bytes(16), 16)),
    "bind": lambda fd: checked(libc.bind(fd, bytes(16), 16)),
    "write file": lambda path: os.open(path, os.O_WRONLY),
    "append file": lambda path: os.open(path, os.O_WRONLY | os.O_APPEND),
    "update file": lambda path: os.open(path, os.O_RDWR),
    "make file": lambda path: os.open(path + ".new", os.O_CREAT | os.O_RDONLY),
    "truncate file": lambda path: os.open(path, os.O_TRUNC | os.O_RDONLY),
    "truncate path": lambda path: os.truncate(path, 0),
    "remove file": os.unlink,
    "rename file": lambda path: os.rename(path, path + ".moved"),
    "make folder": lambda path: os.mkdir(path + ".d"),
    "link": lambda path: os.symlink(path, path + ".link"),
    "chmod": lambda path: os.chmod(path, 0o777),
    "read file": lambda path: os.open(path, os.O_RDONLY),
    "list folder": os.listdir,
    "memory file": lambda: os.memfd_create("x"),
    "write arena": write_arena,
    "make arena writable": make_arena_writable,
    "remove arena pages": remove_arena_pages,
    "open arena": lambda path: os.open(path, os.O_RDWR),
    "write memory": write_memory_of,
    "signal": lambda pid: os.kill(pid, signal.SIGTERM),
    "signal all": lambda: os.kill(-1, 0),
    "signal thread": lambda pid: call(200, pid, 0),
    "pidfd": os.pidfd_open,
    "own signals": own_signals,
    "pin": lambda pid: os.sched_setaffinity(pid, {0}),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "fork": lambda: os.fork() or die(),
    "vfork": lambda: call(58),
    "spawn": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "unshare": lambda: checked(libc.unshare(0x10000000)),
    "ptrace": lambda pid: checked(libc.ptrace(16, pid, None, None)),
    "io_uring": lambda: call(425, 1, None),
    "userfaultfd": lambda: call(323, 0),
    "bpf": lambda: call(321, 0, None, 0),
    "mount": lambda: checked(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
    "become undumpable": lambda: checked(libc.prctl(4, 0, 0, 0, 0)),
    "change limits": lambda: checked(libc.setrlimit(4, bytes(16))),
    "die": die,
    # What must go on working.
    "state": state,
    "thread": start_thread,
    "late import": import_late,
    "clock": lambda: time.sleep(0.001),  # time: the system call
}


class TakenOverProcessor(FakeProcessor):
    def process(self, media, options):
        wanted = json.loads(options)
        try:
            outcome = {"result": ATTACKS[wanted["attack"]](*wanted.get("arguments", ()))}
        except OSError as error:
            outcome = {"errno": error.errno}
        item = super().process(media, b"{}")
        return ProcessedItem(json.dumps(outcome).encode(), item.specs, item.buffers, item.size)


def build_processor(config):
    return TakenOverProcessor()
