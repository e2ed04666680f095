#!/usr/bin/env bash
# What a node of the development cluster is made of, beside what is built from source,
# from the distribution's packages. What is missing is installed where that can be done.
set -euo pipefail
# shellcheck source=hack/debian.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

packages=()
command -v containerd >/dev/null || packages+=(containerd)
command -v runc >/dev/null || packages+=(runc)
[[ -x /usr/lib/cni/ptp ]] || packages+=(containernetworking-plugins)
command -v nft >/dev/null || packages+=(nftables)
command -v ip >/dev/null || packages+=(iproute2)
need packages "the development cluster needs" "${packages[@]}"
