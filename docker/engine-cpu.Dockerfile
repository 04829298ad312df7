# The engine on CPUs (AVX2 or AVX-512), for small models and for trying clora out. Build from the repository's root:
#   docker build -f docker/engine-cpu.Dockerfile -t clora-engine:0.1.0-cpu .
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/clora
ENV PATH=/opt/clora/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/engine-cpu.txt requirements/build.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/engine-cpu.txt
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-deps --require-hashes -r requirements/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && pip install --no-deps /dist/clora-*.whl \
 && pip uninstall --yes pip

FROM python:3.11-slim
# vLLM's CPU kernels place memory by NUMA node; vLLM and clora compile kernels for the CPU that they find.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/clora /opt/clora
RUN mkdir -p /home/clora && chown 10001:10001 /home/clora
ENV PATH=/opt/clora/bin:$PATH HOME=/home/clora PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Fails the build where a dependency is missing.
RUN clora-engine serve --help >/dev/null
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["clora-engine"]
