# The suite on many machines with Elastic Fabric Adapters. Built from the repository's folder:
#
#     docker build -f multi-node/1.Dockerfile -t mosaicml-stable-diffusion:0.32.1 .
#
# NCCL comes with torch (nvidia-nccl-cu13 2.28.9 with torch 2.11.0); AWS's installer brings libfabric
# and the plugin aws-ofi-nccl, through which NCCL uses EFA. 1.51.0 has libfabric 2.7.0 and plugin
# 1.22.0 (release notes of EFA, October 2026), which works with NCCL 2.17.1 and newer.
ARG PYTORCH_IMAGE=nvidia/cuda:13.0.0-base-ubuntu24.04
FROM ${PYTORCH_IMAGE}

ARG EFA_INSTALLER_VERSION=1.51.0
# Of the key that AWS signs each version of the installer with (EC2 user guide, "Get started with
# EFA and NCCL"): an installer with another signature, or none, ends the build.
ARG EFA_KEY_FINGERPRINT=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC
# The host has the kernel module. The plugin's folder differs by distribution: it is looked for, and
# its absence ends the build.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The installer only works in its own folder, which is gone when it has.
# hadolint ignore=DL3003
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates curl gnupg \
    && mkdir -m 700 /tmp/efa && cd /tmp/efa && export GNUPGHOME=/tmp/efa \
    && site=https://efa-installer.amazonaws.com \
    && archive="aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
    && curl -fsSL --fail-early --remote-name-all \
        "$site/aws-efa-installer.key" "$site/$archive" "$site/$archive.sig" \
    && gpg --batch --import aws-efa-installer.key \
    && gpg --batch --status-file status --verify "$archive.sig" "$archive" \
    && grep "VALIDSIG .*${EFA_KEY_FINGERPRINT}" status \
    && tar -xzf "$archive" && cd aws-efa-installer \
    && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
    && rm -rf /tmp/efa /var/lib/apt/lists/* \
    && plugin="$(find /opt/amazon -name 'libnccl-net*.so' -print -quit)" \
    && test -n "$plugin" \
    && dirname "$plugin" > /etc/ld.so.conf.d/aws-ofi-nccl.conf \
    && echo /opt/amazon/efa/lib > /etc/ld.so.conf.d/efa.conf \
    && ldconfig

ARG MOSAICML_VERSION=0.32.1
ARG PYTORCH_INDEX_URL=
COPY requirements-all.txt single-node/install-suite.sh /tmp/install/
RUN /tmp/install/install-suite.sh /tmp/install/requirements-all.txt /opt/venv && rm -r /tmp/install
# An NGC image points the loader at its own torch.
ENV PATH=/opt/venv/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

ARG GIT_COMMIT=
ENV SDBENCH_GIT_COMMIT=${GIT_COMMIT} HOME=/workspace
WORKDIR /workspace/stable-diffusion
COPY . .
RUN mkdir -p runs && chown -R 1000:1000 /workspace
USER 1000:1000
CMD ["bash"]
