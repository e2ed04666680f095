#!/usr/bin/env bash
# What a node of the development cluster is made of, beside what is built from source,
# from the distribution's packages. What is missing is installed where that can be done.
set -euo pipefail

packages=()
command -v containerd >/dev/null || packages+=(containerd)
command -v runc >/dev/null || packages+=(runc)
[[ -x /usr/lib/cni/ptp ]] || packages+=(containernetworking-plugins)
command -v nft >/dev/null || packages+=(nftables)
command -v ip >/dev/null || packages+=(iproute2)
((${#packages[@]})) || exit 0

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
	echo "packages: the development cluster needs ${packages[*]}: install them (Debian: sudo apt-get install ${packages[*]})" >&2
	exit 1
fi
echo "packages: installing ${packages[*]}"
# Only the programs are wanted: each node starts a containerd of its own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
