# The suite on one machine. Built from the repository's folder, so that the suite is inside:
#
#     docker build -f single-node/0.Dockerfile -t mosaicml-stable-diffusion:0.32.1 .
#
# PYTORCH_IMAGE may be a plain CUDA image of NVIDIA's or one of NGC (nvcr.io/nvidia/pytorch:25.10-py3):
# it gives the system and CUDA's tools, requirements-all.txt all Python packages.
ARG PYTORCH_IMAGE=nvidia/cuda:13.0.0-base-ubuntu24.04
FROM ${PYTORCH_IMAGE}

ARG MOSAICML_VERSION=0.32.1
ARG PYTORCH_INDEX_URL=
COPY requirements-all.txt single-node/install-suite.sh /tmp/install/
RUN /tmp/install/install-suite.sh /tmp/install/requirements-all.txt /opt/venv && rm -r /tmp/install
# An NGC image points the loader at its own torch.
ENV PATH=/opt/venv/bin:$PATH LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

ARG GIT_COMMIT=
ENV SDBENCH_GIT_COMMIT=${GIT_COMMIT} HOME=/workspace
WORKDIR /workspace/stable-diffusion
COPY . .
RUN mkdir -p runs && chown -R 1000:1000 /workspace
USER 1000:1000
CMD ["bash"]
