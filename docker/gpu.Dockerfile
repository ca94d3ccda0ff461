# tuner for NVIDIA GPUs. The host needs a driver for CUDA 13.0 or newer and the NVIDIA Container Toolkit.
#
#   docker build -f docker/gpu.Dockerfile -t tuner:gpu .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/workspace" tuner:gpu doctor
#
# CUDA is that of the torch in requirements.txt: DeepSpeed builds its ops with this nvcc, and refuses another version.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6

# The compiler and Python's headers are for ops that are built at the first run; libibverbs lets NCCL use InfiniBand,
# and ssh is for --hostfile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers libibverbs1 openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu's own Python takes no packages of pip.
RUN python3 -m venv /opt/tuner
ENV PATH=/opt/tuner/bin:$PATH

WORKDIR /src
COPY constraints.txt hashes.txt requirements.txt requirements-gpu.txt ./
# What the tests need is left out. uv compares the hashes; torch is the CUDA build of the package registry.
RUN sed -n '/^uv==/,/[^\\]$/p' hashes.txt > uv.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r uv.txt \
    && sed '/^# Tests and checks/,$d' requirements.txt > installed.txt \
    && uv pip install --python /opt/tuner --no-cache \
        --constraints hashes.txt --build-constraints hashes.txt --requirements installed.txt \
    && uv pip install --python /opt/tuner --no-cache --no-deps --require-hashes --requirements requirements-gpu.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY tuner ./tuner
RUN uv pip install --python /opt/tuner --no-cache --no-deps --build-constraints hashes.txt .

# Runs that the user owns: docker build --build-arg UID="$(id -u)". Ubuntu's image has a user 1000 of its own.
ARG UID=1000
RUN if id ubuntu; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid "$UID" tuner && install --directory --owner tuner /workspace
USER $UID
WORKDIR /workspace
ENTRYPOINT ["tuner"]
CMD ["--help"]
