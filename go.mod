module github.com/sandbox-agent/sandbox-agent

go 1.26.0

require (
	connectrpc.com/connect/v2 v2.0.2
	github.com/containerd/ttrpc v1.2.10
	google.golang.org/protobuf v1.36.12
)

require (
	github.com/containerd/log v0.1.0 // indirect
	github.com/sirupsen/logrus v1.9.4 // indirect
	golang.org/x/sys v0.46.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260226221140-a57be14db171 // indirect
	google.golang.org/grpc v1.81.1 // indirect
)
