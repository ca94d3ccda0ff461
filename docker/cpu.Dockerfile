# tuner without a GPU: to try recipes, to look at data, to export and to merge.
#
#   docker build -f docker/cpu.Dockerfile -t tuner:cpu .
#   docker run --rm -v "$PWD:/workspace" tuner:cpu train tiny_full_sample_e3
FROM python:3.11.14-slim-bookworm

# g++ builds DeepSpeed's CPU Adam and its collectives; Debian keeps one version of it in a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY requirements.txt ./
# What the tests need is left out; torch is the CPU build, a tenth of the CUDA one.
RUN sed '/^# Tests and checks/,$d' requirements.txt > installed.txt \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r installed.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY tuner ./tuner
RUN pip install --no-cache-dir --no-deps .

# Runs that the user owns: docker build --build-arg UID="$(id -u)"
ARG UID=1000
RUN useradd --create-home --uid "$UID" tuner && install --directory --owner tuner /workspace
USER $UID
WORKDIR /workspace
ENTRYPOINT ["tuner"]
CMD ["--help"]
