// Package retrytest calls a tool again and again, as agents do, and counts what it
// moved: the same call twice, many times at once, with a lost answer, with a killed
// client. It is what a team runs in its CI against its own tool, or against a sandbox
// of its provider, through a gateway: one that runs, or one within this process.
//
// What must hold here: nothing passes that was not counted. A scenario passes only if
// the count was zero before it, and exactly one after everything has settled. What
// cannot be told is no pass.
package retrytest

import (
	"context"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

// The environment that names a gateway and a token for it.
const (
	envURL   = "HOLDFAST_URL"
	envToken = "HOLDFAST_TOKEN"
)

// What the process ends with.
const (
	// Passed: one effect in every scenario.
	Passed = 0
	// Fault: a scenario had more than one effect, or a retry was not taken for one.
	Fault = 1
	// CannotTell: the test could not be made, or its effects not be counted.
	CannotTell = 2
)

const usage = `Usage: manager retry-test -f FILE [flags]

Calls a tool as agents do that retry, counts what it moved, and says whether it was one
effect each time. FILE has a document of kind RetryTest, which says how the tool is
called and how its effects are counted; with --local also the AgentTool and its
IntentBudget. Ends with 0 if all is well, 1 if there is a fault, 2 if it cannot tell.

`

// list is a flag that may be given more than once.
type list []string

func (l *list) String() string { return strings.Join(*l, ", ") }

func (l *list) Set(v string) error {
	*l = append(*l, v)
	return nil
}

type options struct {
	files, secrets list
	local, verbose bool
	url, tokenFile string
	kubeconfig     string
	serviceAccount string
	namespace      string
	upstream       string
	caFile         string
	command        string
	junit          string
}

func (o *options) bind(fs *flag.FlagSet) {
	fs.Var(&o.files, "f", "A file of YAML documents, or - for the standard input. May be given more than once.")
	fs.BoolVar(&o.local, "local", false, "Test what the files say, through a gateway within this process on an embedded store: there need be no cluster.")
	fs.StringVar(&o.url, "url", "", "The gateway's URL; absent: "+envURL+" of the environment.")
	fs.StringVar(&o.tokenFile, "token-file", "", "A file with the caller's token for the gateway; absent: "+envToken+" of the environment.")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "The cluster whose AgentTool and IntentBudget must be those of the files, and ready.")
	fs.StringVar(&o.serviceAccount, "service-account", "", "Call as this ServiceAccount of the tool's namespace, with a token that is made for it with --kubeconfig.")
	fs.StringVar(&o.namespace, "namespace", "", "The tool's namespace, where the files do not say it; absent: default.")
	fs.StringVar(&o.upstream, "upstream", "", "With --local: the upstream's URL in place of the AgentTool's, such as that of a port that is forwarded.")
	fs.Var(&o.secrets, "secret-from-env", "With --local: NAME/KEY=VARIABLE, the credential in this key of this Secret. May be given more than once.")
	fs.StringVar(&o.caFile, "ca-file", "", "Certificates of authorities to trust beside the system's.")
	fs.StringVar(&o.command, "effects-command", "", "A command for sh that prints how many effects the order in $HOLDFAST_RETRY_ORDER had, in place of the file's effects.")
	fs.StringVar(&o.junit, "junit", "", "Write the report as JUnit XML, too, to this file.")
	fs.BoolVar(&o.verbose, "verbose", false, "With --local: write the gateway's log to the standard error.")
}

func (o *options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unknown argument %q: all settings are flags", rest[0])
	case len(o.files) == 0:
		return errors.New("name a file with -f")
	case o.local && (o.url != "" || o.tokenFile != "" || o.kubeconfig != "" || o.serviceAccount != ""):
		return errors.New("--local needs no cluster: leave out --url, --token-file, --kubeconfig and --service-account")
	case !o.local && (o.upstream != "" || len(o.secrets) > 0 || o.verbose):
		return errors.New("--upstream, --secret-from-env and --verbose are for --local: in a cluster the AgentTool says it")
	case o.serviceAccount != "" && o.kubeconfig == "":
		return errors.New("--service-account needs --kubeconfig, which says where its token is made")
	case o.serviceAccount != "" && o.tokenFile != "":
		return errors.New("--service-account and --token-file both say who calls: leave one out")
	}
	return nil
}

// Main runs the command. It returns what the process ends with.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == clientArg {
		return client(ctx, stdin, stdout)
	}
	// What libraries log is nobody's here: errors come back.
	ctrllog.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	var o options
	fs := flag.NewFlagSet("retry-test", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o.bind(fs)
	fs.Usage = func() {
		_, _ = io.WriteString(stderr, usage)
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return Passed
	} else if err != nil {
		return CannotTell // the flags have said why
	}
	rep := &report{began: time.Now()}
	err := o.check(fs.Args())
	if err == nil {
		err = test(ctx, o, rep, stdin, stderr)
	}
	if err != nil {
		rep.results = append(rep.results, result{scenario: "whole", what: "the test as a whole", verdict: unclear, why: []string{err.Error()}})
	}
	rep.took = time.Since(rep.began)
	code := rep.code()
	if o.junit != "" {
		if err := rep.writeJUnit(o.junit); err != nil {
			rep.notes = append(rep.notes, "the JUnit file was not written: "+err.Error())
			if code == Passed {
				code = CannotTell
			}
		}
	}
	if _, err := io.WriteString(stdout, rep.text()); err != nil {
		return CannotTell
	}
	return code
}

// test reads the files, makes ready and runs all scenarios.
func test(ctx context.Context, o options, rep *report, stdin io.Reader, stderr io.Writer) (err error) {
	docs, err := read(o.files, stdin)
	if err != nil {
		return err
	}
	plan, err := docs.plan(o)
	if err != nil {
		return err
	}
	rep.tool = plan.namespace + "/" + plan.tool
	pool, ca, err := authorities(o.caFile)
	if err != nil {
		return err
	}
	t := &tester{plan: plan, run: runName(), report: rep}
	if t.effects, err = newCounter(plan.effects, o.command, pool); err != nil {
		return err
	}
	if o.local {
		gw, err := startLocal(ctx, o, docs, plan, pool, stderr)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gw.stop()) }()
		t.gateway = remote{url: gw.url, token: gw.token}
		t.keyOf = gw.keyOf
		rep.through = "a gateway within this process, on an embedded store"
		rep.notes = append(rep.notes, gw.notes...)
	} else {
		if t.gateway, err = reach(ctx, o, plan, rep); err != nil {
			return err
		}
		t.gateway.ca = ca
		rep.through = "the gateway " + t.gateway.url
	}
	if plan.settle, err = plan.settling(); err != nil {
		return err
	}
	if t.sender, err = newSender(t.gateway.ca); err != nil {
		return err
	}
	return t.all(ctx)
}

// authorities are those of the system and of a file, and the file's text.
func authorities(file string) (*x509.CertPool, []byte, error) {
	if file == "" {
		return nil, nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, fmt.Errorf("--ca-file: %w", err)
	}
	pool, err := poolOf(text)
	if err != nil {
		return nil, nil, fmt.Errorf("--ca-file %s: %w", file, err)
	}
	return pool, text, nil
}

// poolOf adds certificates to the system's.
func poolOf(text []byte) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificates: %w", err)
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, errors.New("holds no certificate in PEM")
	}
	return pool, nil
}

// unique is v without repetitions, in its order.
func unique(v []string) []string {
	var out []string
	for _, s := range v {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
