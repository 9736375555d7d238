"""Writes the manifests beside it and the units of deploy/systemd from the Helm chart.

    python deploy/kubernetes/render.py

Helm must be on the PATH or in this virtual environment (`make programs`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm" / "medialane"
SYSTEMD = FOLDER.parent / "systemd"

#: The Secret is made by hand, as the chart's would have a new key in each rendering.
VALUES = ("--set", "rpc.secretName=medialane-rpc", "--set", "image.tag=latest")
#: Manifests by the chart's template and what is turned on for it.
MANIFESTS = {
    "gateway.yaml": ("gateway", ()),
    "workers.yaml": ("workers", ()),
    "services.yaml": ("services", ()),
    "availability.yaml": ("availability", ()),
    "networkpolicy.yaml": ("networkpolicy", ()),
    "monitoring/monitors.yaml": ("monitoring", ("--set", "monitoring.enabled=true")),
}

_UNIT = """\
# Written by deploy/kubernetes/render.py; flags and stop timeouts of the parts of a host are the chart's.
[Unit]
Description={description}
{unit}After=network-online.target

[Service]
# It says when it is ready, reloads and stops, and that it lives (sd_notify). With systemd 253 or newer, a drop-in may
# have notify-reload instead, without ExecReload.
Type=notify
{notify}WatchdogSec=60
TimeoutStartSec={start}
ExecReload=/bin/sh -c "kill -HUP $MAINPID"
User=medialane
{settings}{service}ExecStart=/opt/medialane/bin/medialane {command}
# Status 70: what it needs is lost (a worker's engine); a new process has it again.
Restart=always
RestartSec={restart}
# SIGTERM to the process itself, which drains and then ends its own.
KillMode=mixed
TimeoutStopSec={stop}
LimitNOFILE=65536

# Its user writes below /var/lib/medialane, /run/medialane and /dev/shm, and to a /tmp of its own. Preparers have a
# narrower sandbox inside. Not MemoryDenyWriteExecute: loops are compiled; not RemoveIPC: others map the arena.
StateDirectory=medialane
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
{sandbox}
[Install]
WantedBy=multi-user.target
"""
#: Of all but `serve`, which has them in its file.
_SETTINGS = "EnvironmentFile=/etc/medialane/medialane.env\nLoadCredential=rpc-secret:/etc/medialane/rpc-secret\n"
#: Of processes that need no GPU.
_NO_DEVICES = """\
PrivateDevices=yes
# And Landlock for preparers, which no group of systemd 252 has.
SystemCallFilter=@system-service landlock_create_ruleset landlock_add_rule landlock_restrict_self
SystemCallErrorNumber=EPERM
"""
_ONLINE = "Wants=network-online.target\n"
_RUN = "RuntimeDirectory=medialane\nRuntimeDirectoryMode=0700\n"
UNITS: dict[str, dict[str, Any]] = {
    "medialane.service": {
        "description": "medialane serve: store, gateways and workers of this host",
        "unit": _ONLINE,
        "settings": "",
        "service": "LogsDirectory=medialane\nLogsDirectoryMode=0750\n",
        "command": "serve --config=/etc/medialane/serve.toml",
        "start": 1800,
        "restart": 5,
        # Three times --drain-timeout + 60 s.
        "stop": 90,
    },
    "medialane-store.service": {
        "of": ("gateway", "store"),
        "description": "medialane media store",
        "unit": _ONLINE,
        "service": f"{_RUN}# The socket's folder stays while the store restarts: the gateway looks for it there.\n"
        "RuntimeDirectoryPreserve=restart\n",
        "restart": 1,
        "sandbox": _NO_DEVICES,
    },
    "medialane-gateway.service": {
        "of": ("gateway", "gateway"),
        "description": "medialane gateway",
        "unit": "# Not Requires: a gateway keeps serving while the store restarts.\n"
        "Wants=medialane-store.service network-online.target\n",
        "service": "",
        "restart": 1,
        # It listens on all addresses.
        "more": ["--keys=/etc/medialane/keys", "--require-api-key"],
        "sandbox": _NO_DEVICES,
    },
    "medialane-worker@.service": {
        "of": ("worker", "worker-0"),
        "description": "medialane worker on GPU %i",
        "unit": _ONLINE,
        "service": f"Environment=CUDA_VISIBLE_DEVICES=%i\n{_RUN}"
        "# All workers of this host use it: one of them runs the store, whose socket is there.\n"
        "RuntimeDirectoryPreserve=yes\n",
        "restart": 5,
        "more": ["--start-store"],
        "notify": "# Its engine's processes say how far they have loaded the model.\nNotifyAccess=all\n",
    },
}
#: In medialane.env, or a default of medialane.
_LEFT_OUT = re.compile(r"--(rpc-tls-\w+|arena-size|preparers|drain-timeout|metrics-host)=")
#: Of a container's arguments, and what a host has in their place.
_ON_A_HOST = (
    (r"^/models/.*", "${MODEL}"),
    (r"\$\(POD_IP\)", "${ADDRESS}"),
    (r"^--join=.*", "--join=${GATEWAYS}"),
    (r"\$\(POD_NAME\)/0", "%H:%i"),
    (r"^--metrics-port=8001", "--metrics-port=610%i"),
    (r"/etc/medialane/secret", "%d/rpc-secret"),
)


def helm(*words: str) -> str:
    """The output of a command of Helm; raises FileNotFoundError without it."""
    program = shutil.which("helm") or str(Path(sys.prefix) / "bin" / "helm")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def template(*words: str) -> str:
    return helm("template", "medialane", str(CHART), *words)


def manifest(name: str) -> str:
    source, values = MANIFESTS[name]
    text = template("--show-only", f"templates/{source}.yaml", *VALUES, *values)
    lines = [line.rstrip() for line in text.splitlines() if "managed-by: Helm" not in line and "# Source:" not in line]
    parts = [part.strip() for part in re.split(r"^---$", "\n".join(lines), flags=re.MULTILINE)]
    text = "\n---\n".join(part for part in parts if part)
    return f"# Written by deploy/kubernetes/render.py from the Helm chart.\n{text}\n"


def command(args: Sequence[str], more: Sequence[str]) -> Iterator[str]:
    for arg in args[: args.index("--")]:
        if _LEFT_OUT.match(arg):
            continue
        for pattern, replacement in _ON_A_HOST:
            arg = re.sub(pattern, lambda _, text=replacement: text, arg)  # type: ignore[misc]
        yield arg
    yield from (*more, "--", "$MODEL_FLAGS")


def unit(name: str) -> str:
    part = {"settings": _SETTINGS, "notify": "", "sandbox": "", **UNITS[name]}
    if "command" in part:
        return _UNIT.format(**part)
    deployment, container = part["of"]
    source = {"gateway": "gateway", "worker": "workers"}[deployment]
    pod = yaml.safe_load(template("--show-only", f"templates/{source}.yaml", *VALUES))["spec"]["template"]["spec"]
    (found,) = [each for each in pod["containers"] if each["name"] == container]
    probe = found["startupProbe"]
    return _UNIT.format(
        **part,
        start=probe["periodSeconds"] * probe["failureThreshold"],
        command=" ".join(command(found["args"], part.get("more", ()))),
        stop=pod["terminationGracePeriodSeconds"],
    )


def files() -> Iterator[tuple[Path, str]]:
    for name in MANIFESTS:
        yield FOLDER / name, manifest(name)
    for name in UNITS:
        yield SYSTEMD / name, unit(name)


if __name__ == "__main__":
    for path, text in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
