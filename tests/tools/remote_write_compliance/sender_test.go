// Package compliance runs the public suite for senders of remote-write 2.0 on gpuledger-sink.
package compliance

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/prometheus/client_golang/exp/api/remote"
	"github.com/prometheus/compliance/remotewrite/sender"
)

var protocols = map[remote.WriteMessageType]string{
	remote.WriteV1MessageType: "1.0",
	remote.WriteV2MessageType: "2.0",
}

// sink is the program that COMPLIANCE_SINK names, with the protocol of COMPLIANCE_PROTOCOL or, where
// that is empty, the one that the suite asks for.
type sink struct{}

func (sink) Name() string { return "gpuledger-sink" }

func (sink) Run(ctx context.Context, options sender.Options) error {
	protocol := os.Getenv("COMPLIANCE_PROTOCOL")
	if protocol == "" {
		protocol = protocols[options.RemoteWriteMessage]
	}
	return sender.RunCommand(
		ctx, ".",
		[]string{
			"GPULEDGER_HTTP__LISTEN=127.0.0.1:0",
			"GPULEDGER_REMOTE_WRITE__URL=" + options.RemoteWriteEndpointURL,
			"GPULEDGER_REMOTE_WRITE__PROTOCOL=" + protocol,
			"GPULEDGER_REMOTE_WRITE__OPENMETRICS__JOB=" + options.ScrapeTargetJobName,
		},
		os.Getenv("COMPLIANCE_SINK"), "remote_write",
		"--from-openmetrics", fmt.Sprintf("http://%s/metrics", options.ScrapeTargetHostPort),
	)
}

func TestSender(t *testing.T) {
	sender.RunTests(t, sink{}, sender.ComplianceTests())
}
