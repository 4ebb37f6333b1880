# docker build -t lintra .
# docker run --rm --network host lintra web           the page at http://127.0.0.1:8642, on Linux
# docker run --rm --user "$(id -u):$(id -g)" -e USER -e HOME=/tmp -v "$PWD:/work" -w /work lintra train digits
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "$(echo /wheels/lintra-*.whl)[train,speech]" \
    && rm -r /wheels && useradd --create-home lintra
USER lintra
WORKDIR /home/lintra
ENTRYPOINT ["lintra"]
CMD ["--help"]
