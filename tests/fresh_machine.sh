#!/bin/bash
# `make demo` as a plain user on Debian systems made from nothing: `make test-fresh`, before a release.
#
# For each release of Debian in ARGS: without python3-venv (make must name the package), then with it, with pip set up as on
# this machine without its extra indexes, with them and one more that has soundfile's pure wheel only, and `bare`: as the first,
# for a user whose home does not exist, with 2 GB of /tmp and, for the demo, a proxy that does not answer. Last our wheel alone,
# by pip (tests/wheel_alone.sh), for a user whose ~/.cache cannot be written. Indexes that are
# folders, certificates and proxies of this machine are used, its caches are not. Takes some minutes, 5 GB below TMPDIR, the
# network, and root, for chroot. Output of the runs: build/fresh/. The clone is of HEAD.
set -euo pipefail
cd "$(dirname "$0")/.."

suites=${*:-bookworm trixie}
indexes=${INDEXES:-default second bare}
skip() { echo "medialane: fresh machines are not tried: $1"; exit 0; }
[ "$(id -u)" = 0 ] || skip "chroot needs root"
command -v mmdebstrap > /dev/null || skip "no mmdebstrap here (apt-get install mmdebstrap)"

repository=$PWD
out=$PWD/build/fresh
work=$(mktemp -d "${TMPDIR:-/tmp}/fresh.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
mkdir -p "$out"

# pip.conf of a fresh machine, and beside it the paths of this one that it names: ROOT default|second EXTRA
configure() { python3 deploy/images/pip_conf.py "$1/etc/pip.conf" "$2" "$3" > "$1/paths"; }

# A command of a plain user of the machine in $1, in the clone; with its own processes, shared memory and devices. With BARE=1
# the user has no home, and 2 GB of /tmp.
on_machine() {
  unshare --mount --pid --ipc --fork --kill-child -- bash -euc '
    root=$1; shift
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mount --rbind -o ro /sys "$root/sys"
    mount -t tmpfs -o mode=755 dev "$root/dev"
    for name in null zero full random urandom tty; do touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
    ln -s /proc/self/fd "$root/dev/fd"
    mkdir "$root/dev/shm"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    home=/home/user
    [ -z "${BARE:-}" ] || { home=/nonexistent; mount -t tmpfs -o mode=1777,size=2g tmp "$root/tmp"; }
    while read -r path; do
      if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$(dirname "$root$path")"; [ -e "$root$path" ] || touch "$root$path"; fi
      mount --bind -o ro "$path" "$root$path"
    done < "$root/paths"
    proxies=$(env | grep -iE "^(https?|all|no)_proxy=" || true)
    exec chroot --userspec 1000:1000 --groups= "$root" env -i HOME=$home USER=user PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 $proxies \
      timeout 1200 bash -c "cd /home/user/medialane && $*" < /dev/null
  ' on_machine "$@"
}

failed=0
# A command of the machine, and what is to be said if it passes: ROOT LOG WHAT PASSED COMMAND
attempt() {
  SECONDS=0
  if on_machine "$1" "$5" > "$2" 2>&1; then verdict "$3" "$4" "$2"
  elif grep -Eq "No matching distribution found for torch==|depends on torch==[0-9.]+\+cpu" "$2"; then verdict "$3" "not tried: no index here has torch for this Python, as make or pip says" "$2"
  else verdict "$3" "failed: see $2" "$2"; fi
}
verdict() { # WHAT RESULT LOG
  echo "medialane: $1: $2 (${SECONDS} s)"
  [ "${2%%:*}" != failed ] || { failed=1; tail -n 20 "$3" | sed 's/^/    /'; }
}

# An index whose only file is the wheel of soundfile without its library.
version=$(sed -n 's/^soundfile==\([^ ]*\).*/\1/p' requirements/cpu.txt)
mkdir -p "$work/pure/simple/soundfile"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --platform any --dest "$work/pure/files" "soundfile==$version"
for path in "$work"/pure/files/*; do
  echo "<a href='../../files/${path##*/}#sha256=$(sha256sum "$path" | cut -d' ' -f1)'>${path##*/}</a>" > "$work/pure/simple/soundfile/index.html"
done
chmod -R a+rX "$work"

for suite in $suites; do
  SECONDS=0
  root=$work/$suite
  mmdebstrap --quiet --variant=minbase --include=python3,make,git,ca-certificates "$suite" "$root"
  chroot "$root" useradd --create-home --uid 1000 user
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  chmod 644 "$root/etc/resolv.conf" "$root/etc/hosts"
  configure "$root" default ""
  git clone --quiet --no-hardlinks "$repository" "$root/home/user/medialane"
  chown -R 1000:1000 "$root/home/user"

  SECONDS=0
  log=$out/$suite-no-venv.log
  what="Debian $suite without python3-venv"
  if on_machine "$root" make demo EXTRA=cpu > "$log" 2>&1; then verdict "$what" "failed: it passed" "$log"
  elif grep -q "^medialane: .* apt-get install python3-venv" "$log"; then verdict "$what" "make names the package" "$log"
  else verdict "$what" "failed: no word of the package" "$log"; fi

  chroot "$root" apt-get -qq update
  DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get -qq install --no-install-recommends python3-venv > "$out/apt.log" 2>&1
  # As mmdebstrap leaves it.
  rm -rf "$root"/var/lib/apt/lists/*

  for index in $indexes; do
    configure "$root" "${index/bare/default}" "$work/pure/simple"
    log=$out/$suite-$index.log
    what="Debian $suite, $(chroot "$root" python3 -V), $index index"
    demo="make demo EXTRA=cpu"
    [ "$index" != bare ] || {
      what="${what%, bare index}: no home, 2 GB of /tmp, a dead proxy"
      demo="make venv EXTRA=cpu && export {http,https,HTTP,HTTPS}_{proxy,PROXY}=http://127.0.0.1:9 && $demo"
    }
    BARE=$([ "$index" != bare ] || echo 1) attempt "$root" "$log" "$what" "make demo passed" "$demo && .venv/bin/python -c \"import soundfile\""
    on_machine "$root" "[ ! -e .venv/bin/medialane ] || .venv/bin/medialane doctor" >> "$log" 2>&1 || true
    on_machine "$root" "rm -rf .venv ~/.cache"
  done

  chroot "$root" apt-get -qq update
  DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get -qq install --no-install-recommends libnuma1 >> "$out/apt.log" 2>&1
  mkdir -m 555 "$root/home/user/.cache"
  attempt "$root" "$out/$suite-wheel.log" "Debian $suite: the wheel alone, ~/.cache not writable" "serve answered" tests/wheel_alone.sh
done
exit $failed
