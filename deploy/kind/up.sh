#!/usr/bin/env bash
# nearkv on kind, without GPUs: builds the images, makes a cluster, installs, asks one question.
#   deploy/kind/up.sh          (needs docker, kind, kubectl, openssl, curl; about ten minutes)
# CI has no Docker: it lints this script and renders what it applies, and has never run it.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly CLUSTER=nearkv NAMESPACE=nearkv REGISTRY=nearkv.local TAG=0.1.0
readonly IMAGES=(agent extender ingress engine-double)

for tool in docker kind kubectl openssl curl; do
    command -v "$tool" > /dev/null || { echo "up.sh: $tool is missing" >&2; exit 2; }
done

work=$(mktemp -d)
readonly work
forward=
finish() {
    [ -z "$forward" ] || kill "$forward" 2> /dev/null || true
    rm -rf "$work"
}
trap finish EXIT

echo "== Images"
for image in "${IMAGES[@]}"; do
    docker build --quiet --file "deploy/images/$image.Dockerfile" --tag "$REGISTRY/$image:$TAG" .
done

echo "== Cluster"
if ! kind get clusters 2> /dev/null | grep --quiet --line-regexp "$CLUSTER"; then
    kind create cluster --config deploy/kind/cluster.yaml --wait 180s
fi
kubectl config use-context "kind-$CLUSTER" > /dev/null
for image in "${IMAGES[@]}"; do
    kind load docker-image --name "$CLUSTER" "$REGISTRY/$image:$TAG"
done

echo "== GPUs that are none: the scheduler counts them, nobody uses them"
for node in $(kubectl get nodes --output name --selector '!node-role.kubernetes.io/control-plane'); do
    kubectl patch "$node" --subresource=status --type=json --patch \
        '[{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "4"}]' > /dev/null
done

echo "== Secrets"
kubectl create namespace "$NAMESPACE" --dry-run=client --output yaml | kubectl apply --filename - > /dev/null
kubectl label namespace "$NAMESPACE" --overwrite pod-security.kubernetes.io/enforce=privileged > /dev/null
if ! kubectl --namespace "$NAMESPACE" get secret nearkv-auth > /dev/null 2>&1; then
    tokens=()
    for key in agent-token peer-token cluster-secret extender-admin-token ingress-admin-token; do
        openssl rand -hex 24 | tr -d '\n' > "$work/$key"
        tokens+=("--from-file=$key=$work/$key")
    done
    kubectl --namespace "$NAMESPACE" create secret generic nearkv-auth "${tokens[@]}" > /dev/null
fi
if ! kubectl --namespace "$NAMESPACE" get secret nearkv-extender-tls > /dev/null 2>&1; then
    openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj "/CN=nearkv-extender" \
        -addext "subjectAltName=DNS:nearkv-extender.$NAMESPACE.svc" \
        -keyout "$work/tls.key" -out "$work/tls.crt" 2> /dev/null
    # Self-signed: the certificate is its own authority.
    kubectl --namespace "$NAMESPACE" create secret generic nearkv-extender-tls \
        --from-file=tls.crt="$work/tls.crt" --from-file=tls.key="$work/tls.key" \
        --from-file=ca.crt="$work/tls.crt" > /dev/null
fi

echo "== nearkv"
kubectl apply --server-side --kustomize deploy/kustomize/overlays/kind > /dev/null
# kube-scheduler has to be of the cluster's version.
version=$(kubectl version --output json | sed -n '/serverVersion/,/}/s/.*"gitVersion": "\(v[0-9.]*\).*/\1/p')
kubectl --namespace "$NAMESPACE" set image deployment/nearkv-scheduler \
    "kube-scheduler=registry.k8s.io/kube-scheduler:$version" > /dev/null
kubectl --namespace "$NAMESPACE" rollout status daemonset/nearkv-agent --timeout 180s
for name in extender scheduler; do
    kubectl --namespace "$NAMESPACE" rollout status "deployment/nearkv-$name" --timeout 180s
done

echo "== Engines that are doubles"
kubectl apply --filename deploy/kind/engines.yaml > /dev/null
kubectl --namespace llm-inference rollout status deployment/prefill-pool --timeout 180s
kubectl --namespace llm-inference rollout status deployment/decode-pool --timeout 180s
kubectl --namespace "$NAMESPACE" rollout restart deployment/nearkv-ingress > /dev/null
kubectl --namespace "$NAMESPACE" rollout status deployment/nearkv-ingress --timeout 180s
kubectl --namespace llm-inference get pods --output wide

echo "== A question"
kubectl --namespace "$NAMESPACE" port-forward service/nearkv-ingress 18080:80 > /dev/null &
forward=$!
for _ in $(seq 30); do
    if curl --silent --fail --max-time 2 http://127.0.0.1:18080/readyz > /dev/null; then break; fi
    sleep 1
done
curl --silent --show-error --fail --max-time 30 --dump-header - http://127.0.0.1:18080/v1/completions \
    --header 'Content-Type: application/json' \
    --data '{"model": "tiny", "prompt": "Why is the sky blue?", "max_tokens": 8}'
echo
echo "Done. Remove it with deploy/kind/down.sh"
