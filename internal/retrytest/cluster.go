// This file is about a gateway that runs: where it is, who calls, and whether the
// cluster has what the files say. A tool that is not the one in the files is not tested.

package retrytest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
)

const (
	// tokenFor is how long the token lasts that is made for a ServiceAccount.
	tokenFor = time.Hour
	// readyWithin is how long a tool may take that was applied just now.
	readyWithin = time.Minute
	readyEvery  = 500 * time.Millisecond
)

// reach finds the gateway and the caller's token.
func reach(ctx context.Context, o options, p *plan, rep *report) (remote, error) {
	at := or(o.url, os.Getenv(envURL))
	if at == "" {
		return remote{}, fmt.Errorf("which gateway? Give --url, or %s in the environment; or --local for none", envURL)
	}
	u, err := url.Parse(at)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return remote{}, errors.New("the gateway's URL must be like https://holdfast.example.com: http or https, and a host")
	}
	r := remote{url: strings.TrimRight(at, "/")}
	if o.kubeconfig != "" {
		if r.token, err = compare(ctx, o, p); err != nil {
			return remote{}, err
		}
	} else if p.toolObject != nil {
		rep.notes = append(rep.notes, "tested is the tool as the cluster has it; it was not compared with the files, which takes --kubeconfig")
	}
	switch {
	case r.token != "":
	case o.tokenFile != "":
		text, err := os.ReadFile(o.tokenFile)
		if err != nil {
			return remote{}, fmt.Errorf("--token-file: %w", err)
		}
		r.token = strings.TrimSpace(string(text))
	default:
		r.token = os.Getenv(envToken)
	}
	if r.token == "" {
		return remote{}, fmt.Errorf("who calls? Give a token of the audience %s, by --token-file or %s in the environment, or --service-account with --kubeconfig", access.Audience, envToken)
	}
	return r, nil
}

// compare says whether the cluster has what the files say, and serves it. It gives the
// ServiceAccount's token if one is asked for.
func compare(ctx context.Context, o options, p *plan) (string, error) {
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return "", fmt.Errorf("--kubeconfig: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return "", err
	}
	c, err := ctrlclient.New(config, ctrlclient.Options{Scheme: scheme})
	if err != nil {
		return "", fmt.Errorf("reach the cluster of --kubeconfig: %w", err)
	}
	tool, err := ready(ctx, c, p)
	if err != nil {
		return "", err
	}
	if p.toolObject != nil && !equality.Semantic.DeepEqual(p.toolObject.Spec, tool.Spec) {
		return "", fmt.Errorf("the AgentTool %s/%s in the cluster is not the one in the files: apply it first", p.namespace, p.tool)
	}
	if tool.Spec.Effect != v1alpha1.EffectMutating {
		return "", fmt.Errorf("the AgentTool %s/%s moves nothing (effect %s): there is nothing to test", p.namespace, p.tool, tool.Spec.Effect)
	}
	if tool.Spec.Upstream.HTTP == nil {
		return "", notOverHTTP(p.tool)
	}
	p.toolObject = tool
	if p.budgetObject != nil {
		var budget v1alpha1.IntentBudget
		if err := c.Get(ctx, ctrlclient.ObjectKeyFromObject(p.budgetObject), &budget); err != nil {
			return "", fmt.Errorf("read the IntentBudget: %w", err)
		}
		if !equality.Semantic.DeepEqual(p.budgetObject.Spec, budget.Spec) {
			return "", fmt.Errorf("the IntentBudget %s/%s in the cluster is not the one in the files: apply it first", p.namespace, budget.Name)
		}
	}
	if o.serviceAccount == "" {
		return "", nil
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	request, err := clients.CoreV1().ServiceAccounts(p.namespace).CreateToken(ctx, o.serviceAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{access.Audience}, ExpirationSeconds: ptr.To(int64(tokenFor.Seconds()))},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("make a token for the ServiceAccount %s/%s: %w", p.namespace, o.serviceAccount, err)
	}
	return request.Status.Token, nil
}

// ready waits until the tool is served as it was applied last.
func ready(ctx context.Context, c ctrlclient.Client, p *plan) (*v1alpha1.AgentTool, error) {
	end := time.Now().Add(readyWithin)
	for {
		var tool v1alpha1.AgentTool
		err := c.Get(ctx, ctrlclient.ObjectKey{Namespace: p.namespace, Name: p.tool}, &tool)
		if apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("there is no AgentTool %s/%s in the cluster: apply it first, or say with --namespace where it is", p.namespace, p.tool)
		}
		if err == nil {
			r := apimeta.FindStatusCondition(tool.Status.Conditions, v1alpha1.ConditionReady)
			switch {
			case r == nil:
				err = errors.New("nothing is known of it yet")
			case r.ObservedGeneration != tool.Generation:
				err = errors.New("its last change is not served yet")
			case r.Status != metav1.ConditionTrue:
				err = fmt.Errorf("%s: %s", r.Reason, r.Message)
			default:
				return &tool, nil
			}
		}
		if !time.Now().Before(end) {
			return nil, fmt.Errorf("the AgentTool %s/%s is not ready: %w", p.namespace, p.tool, err)
		}
		if err := pause(ctx, readyEvery); err != nil {
			return nil, err
		}
	}
}
