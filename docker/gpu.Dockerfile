# tuner for NVIDIA GPUs. The host needs a driver for CUDA 13.0 or newer and the NVIDIA Container Toolkit.
#
#   docker build -f docker/gpu.Dockerfile -t tuner:gpu .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/workspace" tuner:gpu doctor
#
# CUDA is that of the torch in requirements.txt: DeepSpeed builds its ops with this nvcc, and refuses another version.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

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
COPY requirements.txt ./
# What the tests need is left out.
RUN sed '/^# Tests and checks/,$d' requirements.txt > installed.txt \
    && pip install --no-cache-dir -r installed.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY tuner ./tuner
RUN pip install --no-cache-dir --no-deps .

# Runs that the user owns: docker build --build-arg UID="$(id -u)". Ubuntu's image has a user 1000 of its own.
ARG UID=1000
RUN if id ubuntu; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid "$UID" tuner && install --directory --owner tuner /workspace
USER $UID
WORKDIR /workspace
ENTRYPOINT ["tuner"]
CMD ["--help"]
