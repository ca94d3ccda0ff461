# tuner without a GPU: to try recipes, to look at data, to export and to merge.
#
#   docker build -f docker/cpu.Dockerfile -t tuner:cpu .
#   docker run --rm -v "$PWD:/workspace" tuner:cpu train tiny_full_sample_e3
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# g++ builds DeepSpeed's CPU Adam and its collectives; Debian keeps one version of it in a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt hashes.txt requirements.txt ./
# What the tests need is left out. uv compares the hashes, and takes torch's CPU build, a tenth of the CUDA one,
# from PyTorch's own index, and nothing else from there.
RUN sed -n '/^uv==/,/[^\\]$/p' hashes.txt > uv.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r uv.txt \
    && sed '/^# Tests and checks/,$d' requirements.txt > installed.txt \
    && uv pip install --system --no-cache --torch-backend cpu \
        --constraints hashes.txt --build-constraints hashes.txt --requirements installed.txt
COPY LICENSE README.md pyproject.toml setup.py ./
COPY tuner ./tuner
RUN uv pip install --system --no-cache --no-deps --build-constraints hashes.txt .

# Runs that the user owns: docker build --build-arg UID="$(id -u)"
ARG UID=1000
RUN useradd --create-home --uid "$UID" tuner && install --directory --owner tuner /workspace
USER $UID
WORKDIR /workspace
ENTRYPOINT ["tuner"]
CMD ["--help"]
