#!/usr/bin/env bash
# Set up the suite's Python environment in an image. Both Dockerfiles run it.
#
#   MOSAICML_VERSION      version of Composer; requirements-all.txt has the one that was tested
#   PYTORCH_INDEX_URL     where torch and torchvision come from; empty: PyPI
#
# The environment is one of its own, also on an NGC image with a torch inside: versions come from
# requirements-all.txt and nowhere else.
set -euo pipefail

packages=${1:?usage: install-suite.sh REQUIREMENTS FOLDER}
folder=${2:?usage: install-suite.sh REQUIREMENTS FOLDER}

# An NGC image keeps pip from any torch but its own.
unset PIP_CONSTRAINT
# gcc: torch.compile builds its kernels' launchers with it. git: what code a record was made with.
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

python3 -m venv "$folder"
pip=("$folder/bin/python" -m pip install --no-cache-dir)
wanted=$(mktemp)
sed -E "s/^mosaicml==[^ ]+/mosaicml==${MOSAICML_VERSION:?}/" "$packages" > "$wanted"
if [[ -n ${PYTORCH_INDEX_URL:-} ]]; then
  # A build of torch for another CUDA brings NVIDIA's packages in other versions.
  mapfile -t torch < <(grep -oE '^torch(vision)?==[^ ;]+' "$wanted")
  "${pip[@]}" --index-url "$PYTORCH_INDEX_URL" "${torch[@]}"
  sed -i -E '/^(nvidia-(cu|nccl|nv)[a-z0-9-]*|cuda-[a-z]+|torch|torchvision|triton)==/d' "$wanted"
fi
"${pip[@]}" --no-deps -r "$wanted"
rm "$wanted"
"$folder/bin/python" -c 'import composer, lightning, ray, streaming, torch; print("torch", torch.__version__)'
