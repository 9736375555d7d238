#!/bin/bash
# Our wheel in an empty environment, by pip as docs/deployment.md says: `medialane serve` of the tiny model answers, and stops.
# For tests/fresh_machine.sh, in a clone; needs libnuma1.
set -euo pipefail
work=$(mktemp -d)
trap '[ -z "${serve:-}" ] || kill -9 "$serve" 2> /dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/build"
"$work/build/bin/pip" wheel --no-deps --wheel-dir "$work/dist" . ./packages/medialane-cpu-torch
rm -rf "$work/build"
cd "$work"
python3 -m venv env
env/bin/pip install "$(echo dist/medialane-*.whl)[cpu]" dist/medialane_cpu_torch-*.whl
env/bin/medialane doctor || true
model=$(env/bin/python -c 'import os; from pathlib import Path; from medialane.testing.tiny_model import build_tiny_model as b; print(b(Path("model")))' | tail -n 1)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
VLLM_CPU_KVCACHE_SPACE=1 env/bin/medialane serve "$model" --port "$port" --workers 1 --preparers 1 --arena-size 512MiB \
  -- --max-model-len 8192 --enforce-eager --skip-mm-profiling &
serve=$!
python3 - "$port" "$OLDPWD/docs/images/page-worker.png" << 'EOF'
import base64, json, os, sys, time, urllib.request as u

url, end = f"http://127.0.0.1:{sys.argv[1]}", time.monotonic() + 600
while True:
    try:
        u.urlopen(url + "/ready", timeout=5)
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit("not ready")
        time.sleep(1)
image = "data:image/png;base64," + base64.b64encode(open(sys.argv[2], "rb").read()).decode()
content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is it?"}]
body = json.dumps({"max_tokens": 8, "messages": [{"role": "user", "content": content}]}).encode()
print(u.urlopen(u.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"}), timeout=300).read())
EOF
kill "$serve"
wait "$serve"
serve=
