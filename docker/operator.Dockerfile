# The operator: no torch, no vLLM, no root, nothing written. Build from the repository's root:
#   docker build -f docker/operator.Dockerfile -t clora-operator:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/clora
ENV PATH=/opt/clora/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/operator.txt requirements/build.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/operator.txt
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-deps --require-hashes -r requirements/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && pip install --no-deps /dist/clora-*.whl \
 && pip uninstall --yes pip

FROM python:3.11-slim
COPY --from=build /opt/clora /opt/clora
ENV PATH=/opt/clora/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Fails the build where a dependency is missing.
RUN clora-operator run --help >/dev/null
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["clora-operator"]
CMD ["run"]
