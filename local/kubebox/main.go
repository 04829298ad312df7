// Command kubebox holds every part of a small Kubernetes cluster in one
// program: etcd, the API server, the controller manager, the scheduler, the
// kubelet and the proxy. The first argument picks the part; what follows are
// that part's own flags, unchanged.
//
// One program instead of six shares the client, API and runtime packages that
// are most of each, and is built from Go modules alone.
package main

import (
	"context"
	"fmt"
	"os"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controller "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var parts = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controller.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	if len(os.Args) > 1 {
		name := os.Args[1]
		os.Args = os.Args[1:]
		if name == "etcd" {
			etcdmain.Main(os.Args)
			return
		}
		if part := parts[name]; part != nil {
			os.Exit(cli.Run(part()))
		}
	}
	fmt.Fprintln(os.Stderr, "usage: kubebox etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kube-proxy|kubelet [flags]")
	os.Exit(2)
}
