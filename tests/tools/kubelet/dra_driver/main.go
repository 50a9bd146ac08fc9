// The node's part of a DRA driver with one device, which it prepares for every claim.
//
//	dra-driver ROOT DRIVER POOL DEVICE     ROOT is the kubelet's folder
package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type driver struct {
	dra.UnimplementedDRAPluginServer
	registration.UnimplementedRegistrationServer
	socket, name, pool, device string
}

func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.DRAPlugin, Name: d.name, Endpoint: d.socket,
		SupportedVersions: []string{dra.DRAPluginService},
	}, nil
}

func (d *driver) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Fatal(status.Error)
	}
	log.Printf("registered %s", d.name)
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) NodePrepareResources(_ context.Context, request *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	answer := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, claim := range request.Claims {
		device := &dra.Device{PoolName: d.pool, DeviceName: d.device}
		answer.Claims[claim.Uid] = &dra.NodePrepareResourceResponse{Devices: []*dra.Device{device}}
	}
	return answer, nil
}

func (d *driver) NodeUnprepareResources(_ context.Context, request *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	answer := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, claim := range request.Claims {
		answer.Claims[claim.Uid] = &dra.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

func main() {
	if len(os.Args) != 5 {
		log.Fatal("usage: dra-driver ROOT DRIVER POOL DEVICE")
	}
	name := os.Args[2]
	socket := filepath.Join(os.Args[1], "plugins_registry", name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	serving := &driver{socket: socket, name: name, pool: os.Args[3], device: os.Args[4]}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, serving)
	dra.RegisterDRAPluginServer(server, serving)
	log.Fatal(server.Serve(listener))
}
