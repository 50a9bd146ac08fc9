// Package compliance runs the public suite for senders of remote-write 2.0.
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

// python runs tests/real/sinks/scraping_sender.py by the interpreter that COMPLIANCE_PYTHON names,
// with the protocol of COMPLIANCE_PROTOCOL or, if that is empty, the one that the suite requests.
type python struct{}

func (python) Name() string { return "gpuledger" }

func (python) Run(ctx context.Context, options sender.Options) error {
	protocol := os.Getenv("COMPLIANCE_PROTOCOL")
	if protocol == "" {
		protocol = protocols[options.RemoteWriteMessage]
	}
	return sender.RunCommand(
		ctx, ".", nil,
		os.Getenv("COMPLIANCE_PYTHON"), "-m", "tests.real.sinks.scraping_sender",
		fmt.Sprintf("http://%s/metrics", options.ScrapeTargetHostPort),
		options.RemoteWriteEndpointURL, protocol, options.ScrapeTargetJobName,
	)
}

func TestSender(t *testing.T) {
	sender.RunTests(t, python{}, sender.ComplianceTests())
}
