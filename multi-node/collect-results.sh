#!/usr/bin/env bash
# Copy the runs of a job from its volume to this machine:
#
#     multi-node/collect-results.sh [--namespace NAMESPACE] [CLAIM [FOLDER]]
#
#   CLAIM     the persistent volume claim of the job; default: stable-diffusion-results
#   FOLDER    where its runs go; default: runs/CLAIM of the suite. What is there of an earlier copy
#             is written again
#   IMAGE     variable: the image of the pod that reads the volume, which needs sleep and tar;
#             default: busybox:1.36
#
# Exit codes: 0 if there are runs, 1 if there are none or the cluster does not give them, 2 for a
# bad argument.
set -euo pipefail

IMAGE=${IMAGE:-busybox:1.36}
# Copying the image and mounting the volume comes before.
READY_WITHIN_S=300
# The pod ends by itself if this script was cut off.
READER_LIFE_S=3600

refuse() { # what was wrong, the value, what is allowed, what changes it
  echo "error: $1: got '$2'; allowed: $3; change it with $4." >&2
  exit 2
}

namespace=()
places=()
while (($# > 0)); do
  case $1 in
    --namespace | -n)
      if [[ -z ${2:-} ]]; then
        refuse "no namespace is given" "" "the namespace of the job" --namespace
      fi
      namespace=(--namespace "$2")
      shift 2
      ;;
    --namespace=?*)
      namespace=("$1")
      shift
      ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    -*) refuse "unknown option" "$1" "--namespace NAMESPACE" "$1" ;;
    *)
      places+=("$1")
      shift
      ;;
  esac
done
if ((${#places[@]} > 2)); then
  refuse "too many arguments" "${places[*]}" "a claim and a folder" "CLAIM or FOLDER"
fi
claim=${places[0]:-stable-diffusion-results}
if [[ ! $claim =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ ]]; then
  refuse "this is not the name of a claim" "$claim" "lower-case letters, digits and dashes" CLAIM
fi
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${places[1]:-$suite/runs/$claim}
if ! command -v kubectl > /dev/null; then
  refuse "kubectl is not installed" "" "kubectl on PATH" PATH
fi

in_namespace() {
  kubectl ${namespace[@]+"${namespace[@]}"} "$@" # bash before 4.4 takes an empty list for unset
}

reader=results-reader-$$
delete_reader() {
  in_namespace delete pod "$reader" --ignore-not-found --wait=false > /dev/null || true
}
trap delete_reader EXIT

in_namespace apply -f - << MANIFEST
apiVersion: v1
kind: Pod
metadata:
  name: $reader
spec:
  restartPolicy: Never
  activeDeadlineSeconds: $READER_LIFE_S
  terminationGracePeriodSeconds: 1
  enableServiceLinks: false
  automountServiceAccountToken: false
  # The user that the job writes as.
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
  containers:
    - name: reader
      image: $IMAGE
      command: [sleep, "$READER_LIFE_S"]
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      volumeMounts:
        - name: results
          mountPath: /results
          readOnly: true
  volumes:
    - name: results
      persistentVolumeClaim:
        claimName: "$claim"
MANIFEST

if ! in_namespace wait --for=condition=Ready "pod/$reader" \
  "--timeout=${READY_WITHIN_S}s"; then
  in_namespace describe pod "$reader" | tail -n 12 >&2 || true
  echo "error: the pod that reads the claim $claim does not start; the lines above say why" >&2
  exit 1
fi
mkdir -p "$folder"
in_namespace cp --retries=5 "$reader:/results" "$folder"

num_records=$(find "$folder" -mindepth 2 -maxdepth 2 -name record.json | wc -l)
if ((num_records == 0)); then
  echo "error: the claim $claim holds no record of a run" >&2
  exit 1
fi
echo "$num_records runs in $folder"
