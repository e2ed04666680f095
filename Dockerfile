# Holdfast's images for those who have Docker. `make images` makes the same without it: the same
# user, entry point, files and build flags, which a test of hack/images compares.
#
#   docker build -t holdfast-dev/manager:dev .
#   docker build -t holdfast-dev/provider:dev --target provider .
FROM golang:1.26 AS build
ARG VERSION=dev
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ENV CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off
RUN mkdir -p /out/base/etc/ssl/certs /out/base/tmp /out/state && chmod 1777 /out/base/tmp && chmod 0700 /out/state \
 && cp /etc/ssl/certs/ca-certificates.crt /out/base/etc/ssl/certs/ \
 && printf 'root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >/out/base/etc/passwd \
 && printf 'root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n' >/out/base/etc/group
RUN go build -trimpath -buildvcs=false "-ldflags=-s -w -X main.version=$VERSION" -o /out/manager ./cmd/manager
RUN go build -trimpath -buildvcs=false "-ldflags=-s -w -X main.version=$VERSION" -o /out/provider ./test/provider/cmd/provider
RUN go build -trimpath -buildvcs=false "-ldflags=-s -w -X main.version=$VERSION" -o /out/agent ./test/agent/cmd/agent

FROM scratch AS base
COPY --from=build /out/base/ /
USER 65532:65532

FROM base AS provider
COPY --from=build --chown=65532:65532 /out/state /data
COPY --from=build /out/provider /provider
ENTRYPOINT ["/provider"]

FROM base AS agent
COPY --from=build /out/agent /agent
ENTRYPOINT ["/agent"]

FROM base AS manager
COPY --from=build --chown=65532:65532 /out/state /var/lib/holdfast
COPY --from=build /out/manager /manager
ENTRYPOINT ["/manager"]
