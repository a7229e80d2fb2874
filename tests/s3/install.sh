#!/bin/sh
# Installs Ceph's S3 gateway from the distribution's packages (61 MB), for tests/s3/rgw.py. Where it cannot it says why and succeeds:
# the tests then use moto.
packages="radosgw ceph-mon ceph-osd ceph-common"

without() {
  echo "object store: $1; the tests use moto's server instead of Ceph RGW" >&2
  exit 0
}

for command in radosgw radosgw-admin ceph-mon ceph-osd ceph; do
  command -v "$command" >/dev/null 2>&1 || missing=$command
done
[ -n "${missing:-}" ] || exit 0
command -v apt-get >/dev/null 2>&1 || without "there is no apt-get to install $missing with"
[ "$(id -u)" = 0 ] || without "$missing is not installed, and only root can install it (apt-get install --no-install-recommends $packages)"

log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
wait="-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2"
# The lists of packages may be there already, or too old to be of use.
# shellcheck disable=SC2086
if timeout 600 apt-get $wait install -y --no-install-recommends $packages >"$log" 2>&1 ||
  { timeout 300 apt-get $wait update >"$log" 2>&1 && timeout 600 apt-get $wait install -y --no-install-recommends $packages >>"$log" 2>&1; }; then
  rm -f "$log"
else
  without "apt-get could not install $packages: $(grep -E '^(E|W):' "$log" | tail -n 1) (see $log)"
fi
