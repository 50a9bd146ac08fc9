// A device plugin without devices: a container that is allocated some has their ids in
// NVIDIA_VISIBLE_DEVICES, as NVIDIA's plugin does it.
//
//	device-plugin RESOURCE ID...
package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1beta1 "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

type plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	ids []string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	answer := &v1beta1.ListAndWatchResponse{}
	for _, id := range p.ids {
		answer.Devices = append(answer.Devices, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	if err := stream.Send(answer); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	answer := &v1beta1.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
		})
	}
	return answer, nil
}

func register(resource, endpoint string) error {
	connection, err := grpc.NewClient("unix://"+v1beta1.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = v1beta1.NewRegistrationClient(connection).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: endpoint, ResourceName: resource,
	})
	return err
}

// Serve until a kubelet that starts removes the socket, as it removes all in the folder.
func serve(resource, socket string, ids []string) error {
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	defer server.Stop()
	v1beta1.RegisterDevicePluginServer(server, &plugin{ids: ids})
	go server.Serve(listener)
	if err := register(resource, filepath.Base(socket)); err != nil {
		return err
	}
	log.Printf("registered %s with %d devices", resource, len(ids))
	for {
		if _, err := os.Stat(socket); os.IsNotExist(err) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: device-plugin RESOURCE ID...")
	}
	resource, ids := os.Args[1], os.Args[2:]
	socket := v1beta1.DevicePluginPath + strings.ReplaceAll(resource, "/", "-") + ".sock"
	for {
		log.Print(serve(resource, socket, ids))
		time.Sleep(100 * time.Millisecond)
	}
}
