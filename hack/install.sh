#!/usr/bin/env bash
# Installs Holdfast into the cluster that kubectl is set up for, as config/default has it, and takes it away again.
#
#   hack/install.sh render    prints all of it
#   hack/install.sh deploy    applies it, the kinds first, and waits until it serves
#   hack/install.sh undeploy  takes away what runs, its roles and its policies; the kinds, all objects of them and the
#                             namespace with what Holdfast remembers stay. With ALL=1 nothing stays.
#
# IMG is the image; KUBECTL the program, which is built from its module where there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

image=holdfast-dev/manager:dev
kubectl=${KUBECTL:-$(command -v kubectl || true)}
[[ -n $kubectl ]] || kubectl=$(go run ./hack/controlplane assets)/kubectl

# One object after another, with the image replaced.
render() {
	local want=${IMG:-$image}
	if [[ ! $want =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]]; then
		echo "install: IMG=$want is not the name of an image" >&2
		return 1
	fi
	"$kubectl" kustomize config/default | sed "s|image: $image\$|image: $want|"
}

# Those of the objects whose kind is, or is not, one that holds what must not be lost.
lasting() {
	awk -v keep="$1" 'BEGIN { RS = "---\n"; ORS = "---\n" }
		{ lasts = /(^|\n)kind: (CustomResourceDefinition|Namespace)\n/; if (lasts == keep) print }'
}

apply() { "$kubectl" apply --server-side --force-conflicts --validate=strict -f -; }

case ${1:-} in
render) render ;;
# What undeploy takes away.
passing) render | lasting 0 ;;
deploy)
	all=$(render)
	lasting 1 <<<"$all" | apply
	"$kubectl" kustomize config/crd | "$kubectl" wait --for=condition=Established --timeout=60s -f -
	apply <<<"$all"
	namespace=$(sed -n 's/^namespace: //p' config/default/kustomization.yaml)
	"$kubectl" --namespace "$namespace" rollout status --timeout=5m deployment --selector app.kubernetes.io/name=holdfast
	;;
undeploy)
	if [[ ${ALL:-} == 1 ]]; then
		render | "$kubectl" delete --ignore-not-found -f -
	else
		render | lasting 0 | "$kubectl" delete --ignore-not-found -f -
	fi
	;;
*)
	echo "install: say render, deploy or undeploy" >&2
	exit 2
	;;
esac
