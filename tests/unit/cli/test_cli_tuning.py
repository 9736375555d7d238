import subprocess
import sys

import pytest

#: In a process of its own: the settings apply to the whole process.
SCRIPT = """
import resource, sys
from medialane.cli.serving import tune_process

if sys.argv[1] == "tuned":
    tune_process()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def items():
    found = [b"x" * 7_500_000 for _ in range(8)]
    del found

items()
before = faults()
items()
print(faults() - before)
"""


def num_faults(how):
    ran = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=60)
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_media_are_reused_without_page_faults():
    assert num_faults("tuned") < 1000
    assert num_faults("default") > 5000
