// Command pause holds a pod's namespaces and does nothing else. It ends on SIGTERM and SIGINT, as the kubelet asks it to.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
}
