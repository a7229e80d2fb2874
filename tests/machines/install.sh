#!/bin/sh
# Installs iproute2, for tests/machines. Where it cannot it says why and succeeds: the tests are then skipped.
without() {
  echo "several machines: $1; their tests are skipped" >&2
  exit 0
}

[ "$(uname)" = Linux ] || exit 0
command -v ip >/dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || exit 0 # nor could the tests make namespaces
command -v apt-get >/dev/null 2>&1 || without "there is no apt-get to install iproute2 with"

log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
wait="-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2"
# The lists of packages may be there already, or too old to be of use.
# shellcheck disable=SC2086
if timeout 120 apt-get $wait install -y --no-install-recommends iproute2 >"$log" 2>&1 ||
  { timeout 120 apt-get $wait update >"$log" 2>&1 && timeout 120 apt-get $wait install -y --no-install-recommends iproute2 >>"$log" 2>&1; }; then
  rm -f "$log"
else
  without "apt-get could not install iproute2: $(grep -E '^(E|W):' "$log" | tail -n 1) (see $log)"
fi
