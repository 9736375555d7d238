#!/bin/sh
# Puts Debian's libnuma.so.1 into the folder FOLDER: requirements/libnuma.sh FOLDER. vLLM's CPU build is linked against it, and
# no wheel has it. As any user, with apt, from the archive that the system is configured for; nothing of the system changes.
set -eu
folder=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download libnuma1 || {
  # A system that has just been made has no lists of packages.
  mkdir -p lists/partial archives/partial
  set -- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work"
  apt-get -qq "$@" update
  apt-get "$@" download libnuma1
}
dpkg -x libnuma1_*.deb .
cp -L usr/lib/*/libnuma.so.1 "$folder"
