// The kubelet's pod-resources API as Kubernetes publishes it, answering from a file.
//
//	kubelet SOCKET FILE     FILE holds a ListPodResourcesResponse as JSON, read at each question
//
// Beside FILE may lie FILE.delay, how long an answer takes, such as `3s`, and FILE.refuse, code
// and message with which every question is refused, such as `UNIMPLEMENTED no such service`.
package main

import (
	"context"
	"log"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

type server struct {
	v1.UnimplementedPodResourcesListerServer
	file string
}

func (s *server) List(ctx context.Context, _ *v1.ListPodResourcesRequest) (*v1.ListPodResourcesResponse, error) {
	if text, err := os.ReadFile(s.file + ".refuse"); err == nil {
		name, message, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(strconv.Quote(name))); err != nil {
			return nil, err
		}
		return nil, status.Error(code, message)
	}
	if text, err := os.ReadFile(s.file + ".delay"); err == nil {
		delay, err := time.ParseDuration(strings.TrimSpace(string(text)))
		if err != nil {
			return nil, err
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	text, err := os.ReadFile(s.file)
	if err != nil {
		return nil, err
	}
	answer := &v1.ListPodResourcesResponse{}
	return answer, protojson.Unmarshal(text, answer)
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: kubelet SOCKET FILE")
	}
	socket, file := os.Args[1], os.Args[2]
	// As the kubelet does it: what an earlier run left behind would be in the way.
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	serving := grpc.NewServer(grpc.MaxSendMsgSize(64 << 20))
	v1.RegisterPodResourcesListerServer(serving, &server{file: file})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		serving.Stop()
	}()
	if err := serving.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
