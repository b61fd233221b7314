# nearkv-ingress. Build from the root of the repository:
#   docker build -f deploy/images/ingress.Dockerfile -t $REGISTRY/ingress:$TAG .
# Pin PYTHON_IMAGE by digest for builds that are to be repeatable.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# The component folders are linked under src/nearkv: all of them go along, as they lie.
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY src src
COPY agent agent
COPY extender extender
COPY ingress ingress
COPY transfer transfer
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-compile ".[envoy,ingress,otel]"

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="nearkv-ingress" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="OpenAI-compatible entry: routes requests by the real KV cache"
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# The chart runs the agent as root without capabilities, and says why.
USER 65532:65532
ENTRYPOINT ["nearkv-ingress"]
