#!/usr/bin/env bash
# Set up the suite's Python environment in an image. Both Dockerfiles run it.
#
#   MOSAICML_VERSION      version of Composer; requirements.txt names the one that was tested
#   PYTORCH_INDEX_URL     where torch and torchvision come from; empty: PyPI
#   TORCH_VERSION         a torch newer than Composer's own pins allow; empty: that of requirements.txt
#   TORCHVISION_VERSION   the torchvision that belongs to it
#
# The environment is one of its own, also on an NGC image with a torch inside: versions come from
# requirements.txt and constraints.txt and nowhere else.
set -euo pipefail

files=${1:?usage: install-suite.sh FOLDER_OF_REQUIREMENTS FOLDER}
folder=${2:?usage: install-suite.sh FOLDER_OF_REQUIREMENTS FOLDER}

if [[ -n ${TORCH_VERSION:-} && -z ${TORCHVISION_VERSION:-} ]]; then
  echo "error: TORCH_VERSION is set and TORCHVISION_VERSION is not: got ''; allowed: the version" \
    "that belongs to torch $TORCH_VERSION; change it with --build-arg TORCHVISION_VERSION." >&2
  exit 2
fi
# An NGC image keeps pip from any torch but its own.
unset PIP_CONSTRAINT
# gcc: torch.compile builds its kernels' launchers with it. git: what code a record was made with.
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

python3 -m venv "$folder"
pip=("$folder/bin/python" -m pip install --no-cache-dir)
wanted=$(mktemp) constraints=$(mktemp)
sed "s/^mosaicml==.*/mosaicml==${MOSAICML_VERSION:?}/" "$files/requirements.txt" > "$wanted"
if cmp -s "$wanted" "$files/requirements.txt"; then
  # A build of torch for another CUDA brings other versions of NVIDIA's packages.
  grep -vE '^(nvidia-.*-cu12|torch|torchvision|triton)==' "$files/constraints.txt" > "$constraints"
fi
if [[ -n ${PYTORCH_INDEX_URL:-} ]]; then
  mapfile -t torch < <(grep -E '^torch(vision)?==' "$wanted")
  "${pip[@]}" --index-url "$PYTORCH_INDEX_URL" "${torch[@]}"
fi
"${pip[@]}" -r "$wanted" -r "$files/requirements-ray.txt" -c "$constraints"
if [[ -n ${TORCH_VERSION:-} ]]; then
  # pip warns that Composer asks for another torch, and installs this one. Tried: 2.11.0, on a CPU.
  "${pip[@]}" ${PYTORCH_INDEX_URL:+--extra-index-url "$PYTORCH_INDEX_URL"} \
    "torch==$TORCH_VERSION" "torchvision==$TORCHVISION_VERSION"
fi
rm "$wanted" "$constraints"
"$folder/bin/python" -c 'import composer, lightning, ray, streaming, torch; print("torch", torch.__version__)'
