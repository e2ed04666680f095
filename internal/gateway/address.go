// This file is about where an upstream may be. A tool's owner writes the URL, so
// the gateway must not become its way into places that only the gateway can
// reach. Addresses are judged when they are dialled, after the name was resolved:
// a name that changes its mind in between gains nothing, and another namespace's
// consent is asked for its address under whatever name. A connection that was kept
// is judged again before it is used.

package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Addresses say which addresses are never an upstream's, beyond those that never are.
type Addresses struct {
	// AllowLoopback is for development: upstreams on the machine itself.
	AllowLoopback bool
	// Reserved are addresses that are never an upstream's; port 0 means every port. They
	// are refused even with AllowLoopback.
	Reserved func() []netip.AddrPort
	// Places says of an address in the cluster whose it is, at each dial: reserved ones
	// are refused like those above, and other namespaces must consent. Nil: nobody's.
	Places Places
	// ClusterDomain is that of Services; "": cluster.local.
	ClusterDomain string
	// listener is the gateway's own port.
	listener func() uint16
	// consent is asked for what Places finds.
	consent Consent
}

// Places says whether an address is the API server's or Holdfast's own, and otherwise
// which namespaces have a Service, or a pod behind one, at it.
type Places interface {
	Of(ctx context.Context, to netip.AddrPort) (reserved bool, namespaces []string, err error)
}

// callerOf is the key under which a context carries the namespace of the tool that dials.
type callerOf struct{}

// dialledFor says whose tool dials: without it, no namespace's Services are its own.
func dialledFor(ctx context.Context, toolNamespace string) context.Context {
	return context.WithValue(ctx, callerOf{}, toolNamespace)
}

// place judges whose the address is.
func (a *Addresses) place(ctx context.Context, to netip.AddrPort) error {
	if a.Places == nil {
		return nil
	}
	reserved, namespaces, err := a.Places.Of(ctx, netip.AddrPortFrom(carried(to.Addr()), to.Port()))
	if err != nil {
		return fmt.Errorf("%w: %w", &addressError{why: "not known to be nobody's in the cluster"}, err)
	}
	if reserved {
		return &addressError{why: "the API server or Holdfast itself"}
	}
	tool, _ := ctx.Value(callerOf{}).(string)
	for _, ns := range namespaces {
		if ns == tool {
			continue
		}
		allowed := false
		if a.consent != nil {
			if allowed, err = a.consent.Allows(ctx, ns, tool); err != nil {
				return fmt.Errorf("%w: %w", &addressError{why: "in another namespace, whose consent could not be asked"}, err)
			}
		}
		if !allowed {
			return &addressError{why: "in the namespace " + ns + ", which does not let its Services be upstreams of this tool's namespace"}
		}
	}
	return nil
}

// addressError is an address that is refused. Nothing was sent.
type addressError struct{ why string }

func (e *addressError) Error() string { return "the upstream's address is refused: it is " + e.why }

// metadata are the addresses at which clouds tell a machine its secrets.
var metadata = map[netip.Addr]bool{
	netip.MustParseAddr("169.254.169.254"): true,
	netip.MustParseAddr("fd00:ec2::254"):   true,
	netip.MustParseAddr("100.100.100.200"): true,
	netip.MustParseAddr("168.63.129.16"):   true,
	netip.MustParseAddr("192.0.0.192"):     true,
}

// MetadataServices are the addresses of all that a gateway takes for one.
func MetadataServices() []netip.Addr { return slices.Collect(maps.Keys(metadata)) }

var (
	thisNetwork = netip.MustParsePrefix("0.0.0.0/8")
	broadcast   = netip.MustParseAddr("255.255.255.255")
	// In these an IPv4 address is carried: 64:ff9b::/96 (RFC 6052) and ::/96 (RFC 4291) in
	// the last four bytes, 2002::/16 (RFC 3056) after the first two.
	nat64      = netip.MustParsePrefix("64:ff9b::/96")
	compatible = netip.MustParsePrefix("::/96")
	sixToFour  = netip.MustParsePrefix("2002::/16")
)

// carried gives the IPv4 address within an IPv6 one, or the address itself.
func carried(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if addr.Is4() || addr == netip.IPv6Unspecified() || addr.IsLoopback() {
		return addr
	}
	b := addr.As16()
	switch {
	case nat64.Contains(addr), compatible.Contains(addr):
		return netip.AddrFrom4([4]byte(b[12:]))
	case sixToFour.Contains(addr):
		return netip.AddrFrom4([4]byte(b[2:6]))
	}
	return addr
}

// check judges an address that is about to be dialled.
func (a *Addresses) check(to netip.AddrPort) error {
	addr := carried(to.Addr())
	refuse := func(why string) error { return &addressError{why: why} }
	switch {
	case !addr.IsValid(), addr.IsUnspecified(), thisNetwork.Contains(addr):
		return refuse("an unspecified address")
	case metadata[addr]:
		return refuse("a metadata service")
	case addr.IsLinkLocalUnicast():
		return refuse("a link-local address")
	case addr.IsMulticast(), addr == broadcast:
		return refuse("a multicast or broadcast address")
	}
	if a.Reserved != nil {
		for _, r := range a.Reserved() {
			if carried(r.Addr()) == addr && (r.Port() == 0 || r.Port() == to.Port()) {
				return refuse("the API server or Holdfast itself")
			}
		}
	}
	own, err := ownAddress(addr)
	if err != nil {
		return err
	}
	switch {
	case !own && !addr.IsLoopback():
		return nil
	case a.listener != nil && a.listener() == to.Port():
		return refuse("Holdfast itself")
	case a.AllowLoopback:
		return nil
	case addr.IsLoopback():
		return refuse("a loopback address")
	default:
		return refuse("the gateway's own address")
	}
}

// ownFor is how long the machine's own addresses are taken for what they were: to read
// them costs as much as to connect.
const ownFor = time.Second

// own are the machine's own addresses, as read last.
var own struct {
	mu    sync.Mutex
	at    time.Time
	addrs map[netip.Addr]bool
}

// ownAddress says that an interface of this machine or pod has the address.
func ownAddress(addr netip.Addr) (bool, error) {
	own.mu.Lock()
	defer own.mu.Unlock()
	if own.addrs == nil || time.Since(own.at) > ownFor {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return false, &addressError{why: "not known to be another machine's: the gateway cannot read its own addresses"}
		}
		addrs := map[netip.Addr]bool{}
		for _, a := range list {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok {
					addrs[ip.Unmap()] = true
				}
			}
		}
		own.at, own.addrs = time.Now(), addrs
	}
	return own.addrs[addr], nil
}

// control is a net.Dialer's: it sees every address that is really dialled.
func (a *Addresses) control(ctx context.Context, network, address string, _ syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return &addressError{why: "not reached by TCP"}
	}
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return &addressError{why: "not readable"}
	}
	return a.judge(ctx, to)
}

// judge says whether an attempt may go to an address now.
func (a *Addresses) judge(ctx context.Context, to netip.AddrPort) error {
	if err := a.check(to); err != nil {
		return err
	}
	return a.place(ctx, to)
}

// dial connects to host:port. Names are taken as absolute, so that the resolver's
// search list never turns one into a Service of Holdfast's own namespace.
func (a *Addresses) dial(ctx context.Context, hostport string) (*net.TCPConn, error) {
	return a.dialWith(ctx, net.Dialer{}, hostport)
}

// dialOnce is dial for an attempt. Its connection is watched by a deadline and by what
// the kernel has not delivered, so it need not be probed for life.
func (a *Addresses) dialOnce(ctx context.Context, hostport string) (*net.TCPConn, error) {
	return a.dialWith(ctx, net.Dialer{KeepAlive: -1}, hostport)
}

func (a *Addresses) dialWith(ctx context.Context, dialer net.Dialer, hostport string) (*net.TCPConn, error) {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		return nil, fmt.Errorf("the upstream's address: %w", err)
	}
	dialer.ControlContext = a.control
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(a.absolute(host), port))
	if err != nil {
		// Of several addresses the first one's error is told; a refusal is told in any case.
		var refused *addressError
		if errors.As(err, &refused) {
			return nil, refused
		}
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(errors.New("the upstream is not reached by TCP"), conn.Close())
	}
	return tcp, nil
}

// Dial connects to another server than an upstream's on behalf of a namespace, whose
// object says where it is: the same addresses are refused, and the same consent asked.
func (a Addresses) Dial(ctx context.Context, namespace, network, address string, consent Consent) (net.Conn, error) {
	if network != "tcp" {
		return nil, &addressError{why: "not reached by TCP"}
	}
	a.consent = consent
	conn, err := a.dial(dialledFor(ctx, namespace), address)
	if err != nil {
		return nil, err
	}
	return conn, nil
}

func (a *Addresses) domain() string {
	if a.ClusterDomain == "" {
		return "cluster.local"
	}
	return strings.Trim(a.ClusterDomain, ".")
}

func (a *Addresses) absolute(host string) string {
	if _, err := netip.ParseAddr(host); err == nil {
		return host
	}
	host = strings.TrimSuffix(host, ".")
	switch lower := strings.ToLower(host); {
	case lower == "localhost":
		return lower // known from /etc/hosts, where it has no dot
	case strings.HasSuffix(lower, ".svc"):
		host += "." + a.domain()
	}
	return host + "."
}

// serviceNamespace gives the namespace of the Service or pod that a host names; "": it names none.
func (a *Addresses) serviceNamespace(host string) string {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	host = strings.TrimSuffix(host, "."+a.domain())
	for _, kind := range []string{".svc", ".pod"} {
		if before, ok := strings.CutSuffix(host, kind); ok {
			return before[strings.LastIndexByte(before, '.')+1:]
		}
	}
	return ""
}
