#!/bin/sh
# What Python packages need of the system and do not bring: Mooncake's library links libibverbs.
set -eu
if ldconfig -p | grep -q 'libibverbs\.so\.1'; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "libibverbs is missing: without it transfer_backend: mooncake is refused, and its tests are skipped" >&2
    echo "to install it: sudo apt-get install libibverbs1" >&2
    exit 0
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends libibverbs1
