#!/usr/bin/env bash
# Installs Holdfast into the cluster that kubectl is set up for, as config/default has it, and takes it away again.
#
#   hack/install.sh render    prints all of it
#   hack/install.sh deploy    applies it, the kinds first, and waits until it serves
#   hack/install.sh undeploy  takes away what runs, and its roles; the kinds, all objects of them, the admission policies
#                             that guard them and the namespace with what Holdfast remembers stay. With ALL=1 nothing
#                             stays.
#
# IMG is the image, in place of the one that config/default has; empty: that one, or what you have named there. KUBECTL the program, which is built from its module where there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

image=holdfast-dev/manager:dev
kubectl=${KUBECTL:-$(command -v kubectl || true)}
[[ -n $kubectl ]] || kubectl=$(go run ./hack/controlplane assets)/kubectl

# One object after another, with the image replaced if IMG names one.
render() {
	local want=${IMG:-} all
	if [[ -z $want ]]; then
		"$kubectl" kustomize config/default
		return
	fi
	if [[ ! $want =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]]; then
		echo "install: IMG=$want is not the name of an image" >&2
		return 1
	fi
	all=$("$kubectl" kustomize config/default)
	if ! grep -q "image: $image\$" <<<"$all"; then
		echo "install: config/default does not have the image $image, which IMG replaces: leave IMG out, and the image that is named there is installed" >&2
		return 1
	fi
	sed "s|image: $image\$|image: $want|" <<<"$all"
}

# Those of the objects that are, or are not, of the kinds of the regular expression $2.
of() {
	awk -v keep="$1" -v kinds="(^|\n)kind: ($2)\n" 'BEGIN { RS = "---\n"; ORS = "---\n" }
		{ if (($0 ~ kinds) == keep) print }'
}

# What holds what must not be lost.
lasting='CustomResourceDefinition|Namespace'
# What guards it. It needs nothing that runs: without it, whoever may patch a hold could write a decision that is taken
# once Holdfast is back.
guarding='ValidatingAdmissionPolicy|ValidatingAdmissionPolicyBinding|MutatingAdmissionPolicy|MutatingAdmissionPolicyBinding'

# Before anything is applied: kubectl's own error names an address that nobody has asked for.
reach() {
	local why
	if ! why=$("$kubectl" get --raw=/version --request-timeout=15s 2>&1 </dev/null); then
		echo "install: kubectl reaches no cluster: set KUBECONFIG. It says: ${why##*$'\n'}" >&2
		exit 1
	fi
}

apply() { "$kubectl" apply --server-side --force-conflicts --validate=strict -f -; }

case ${1:-} in
render) render ;;
# What undeploy takes away.
passing) render | of 0 "$lasting|$guarding" ;;
deploy)
	reach
	all=$(render)
	of 1 "$lasting" <<<"$all" | apply
	"$kubectl" kustomize config/crd | "$kubectl" wait --for=condition=Established --timeout=60s -f -
	apply <<<"$all"
	namespace=$(sed -n 's/^namespace: //p' config/default/kustomization.yaml)
	"$kubectl" --namespace "$namespace" rollout status --timeout=5m deployment --selector app.kubernetes.io/name=holdfast
	;;
undeploy)
	reach
	# First what runs: its end takes as long as its longest call, for which it needs its rights.
	render | of 1 Deployment | "$kubectl" delete --ignore-not-found --cascade=foreground --timeout=7m -f -
	if [[ ${ALL:-} == 1 ]]; then
		render | "$kubectl" delete --ignore-not-found -f -
	else
		render | of 0 "$lasting|$guarding" | "$kubectl" delete --ignore-not-found -f -
	fi
	;;
*)
	echo "install: say render, deploy or undeploy" >&2
	exit 2
	;;
esac
