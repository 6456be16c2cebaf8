module github.com/sandbox-agent/sandbox-agent/tools/gen

go 1.26.0

tool (
	connectrpc.com/connect/v2/cmd/protoc-gen-connect-go
	github.com/containerd/ttrpc/cmd/protoc-gen-go-ttrpc
	google.golang.org/protobuf/cmd/protoc-gen-go
)

require (
	connectrpc.com/connect/v2 v2.0.2 // indirect
	github.com/containerd/ttrpc v1.2.10 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
