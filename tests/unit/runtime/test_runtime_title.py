"""The title of a process, which is written over its command line."""

import os
import subprocess
import sys

from medialane.runtime.linux import WARM, has_title

PROGRAM = """
import os
from pathlib import Path
from medialane.runtime.linux import reserve_title, set_title

def shown():
    return Path("/proc/self/cmdline").read_text().strip("\\0"), Path("/proc/self/comm").read_text().strip()

reserve_title()
os.environ.clear()
os.environ["NAME"] = "changed"
set_title("gateway 0", ["model", "--port", "80"])
print(*shown(), sep="|")
if os.fork() == 0:
    set_title("store")
    print(*shown(), os.environ["NAME"], sep="|", flush=True)
    os._exit(0)
os.wait()
print(*shown(), sep="|")
"""


def test_title_replaces_the_command_line_and_a_fork_has_its_own():
    words = [sys.executable, "-u", "-c", PROGRAM, "an", "argument"]
    done = subprocess.run(words, env=os.environ | {"KEY": "secret"}, capture_output=True, text=True, check=True)
    gateway = "medialane gateway 0 model --port 80|medialane gatew"
    assert done.stdout.splitlines() == [gateway, "medialane store|medialane store|changed", gateway]


def test_title_is_found_whatever_its_arguments():
    program = "import sys; from medialane.runtime.linux import set_title; set_title(sys.argv[1], sys.argv[2:])"
    program += "; print(flush=True); input()"

    def shown(*words):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", program, *words], **pipes) as process:
            process.stdout.readline()
            try:
                return has_title(process.pid, WARM)
            finally:
                process.communicate(b"\n")

    assert shown("warm")
    assert shown("warm", "model")
    assert not shown("warmer")
    assert not shown("store", "warm")
    assert not has_title(os.getpid(), WARM)
