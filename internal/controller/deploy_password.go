// This file has the server of a deployed store accept the passwords of its Secret: at its
// first start, and while one is rotated. The steps of a rotation are in package workload; each
// of them can be repeated, and a process that dies between two leaves the rest to the next.

package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/valkey-io/valkey-go"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// acceptTimeout bounds a talk with a server about its passwords.
const acceptTimeout = 5 * time.Second

// errAdminRefused says that the server does not know the operator's own password.
var errAdminRefused = errors.New("the server refuses the operator's own password")

// rotate brings the Secret and the server's passwords on as far as that goes. It returns what
// keeps the server from being as it should.
func (d *Deployer) rotate(ctx context.Context, s *v1alpha1.IdempotencyStore, c workload.Credentials, ca []byte, pod *corev1.Pod) (*Deployed, error) {
	stepped, derived := c.Rotate(d.now()), c.Derive()
	if stepped || derived {
		if err := d.writeSecret(ctx, c); err != nil {
			return nil, err
		}
	}
	if pod == nil {
		return nil, nil
	}
	server := serverOf(pod)
	if c.Accepted(server) {
		return nil, nil
	}
	bounded, cancel := context.WithTimeout(ctx, acceptTimeout)
	defer cancel()
	var err error
	if s.Spec.Redis != nil {
		err = d.setRedisPasswords(bounded, s, c, ca)
	} else {
		err = d.setPostgresPassword(bounded, s, c)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, errAdminRefused) && s.Spec.Redis != nil:
		return &Deployed{Reason: reasonPassword, Message: fmt.Sprintf(
			"The server does not know the passwords of Secret %s/%s. It reads them at its start: kubectl delete pod %s --namespace=%s",
			s.Namespace, workload.SecretName(s), workload.PodName(s), s.Namespace)}, nil
	case errors.Is(err, errAdminRefused):
		return &Deployed{Reason: reasonPassword, Message: fmt.Sprintf(
			"The volume was initialised with another Secret than %[1]s/%[2]s. Restore that one, or give the server the %[3]s of this one: "+
				"kubectl exec -it %[4]s --namespace=%[1]s -- psql -U %[5]s -c '\\password %[5]s'",
			s.Namespace, workload.SecretName(s), workload.KeyAdminPassword, workload.PodName(s), workload.PostgresSuperuser)}, nil
	case err != nil:
		return &Deployed{Reason: reasonPassword, Message: fmt.Sprintf(
			"The server at %s could not be told its passwords yet: %v.", workload.Endpoint(s), err)}, nil
	}
	c.Accept(server, d.now())
	return nil, d.writeSecret(ctx, c)
}

// writeSecret keeps whatever somebody else has written since it was read: that is a conflict,
// and the next visit begins with it.
func (d *Deployer) writeSecret(ctx context.Context, c workload.Credentials) error {
	if err := d.live.Update(ctx, c.Secret, client.FieldOwner(ownerDeployer)); err != nil {
		return fmt.Errorf("write Secret %s/%s: %w", c.Secret.Namespace, c.Secret.Name, err)
	}
	return nil
}

// serverOf names what remembers the passwords. A Redis does until its process ends. A PostgreSQL
// keeps them on its volume, but one that begins on a volume that was emptied has none, and looks
// the same from here; so each process is told.
func serverOf(pod *corev1.Pod) string {
	id := string(pod.UID)
	for i := range pod.Status.ContainerStatuses {
		if c := &pod.Status.ContainerStatuses[i]; c.Name == workload.ContainerName() {
			id += " " + c.ContainerID
		}
	}
	return id
}

func (d *Deployer) setRedisPasswords(ctx context.Context, s *v1alpha1.IdempotencyStore, c workload.Credentials, ca []byte) error {
	user, password := c.Admin()
	opts := valkey.ClientOption{
		InitAddress: []string{workload.Endpoint(s)}, Username: user, Password: password,
		Dialer: net.Dialer{Timeout: acceptTimeout}, ConnWriteTimeout: acceptTimeout,
		ForceSingleClient: true, DisableCache: true, DisableRetry: true, ClientSetInfo: valkey.DisableClientSetInfo,
	}
	if s.Spec.Redis.Deploy.TLS != nil {
		config, err := clientTLS(string(ca), workload.Host(s))
		if err != nil {
			return err
		}
		opts.TLSConfig = config
	}
	opts.DialCtxFn = func(_ context.Context, address string, _ *net.Dialer, config *tls.Config) (net.Conn, error) {
		conn, err := d.dial(ctx, s.Namespace, "tcp", address)
		if err != nil || config == nil {
			return conn, err
		}
		encrypted := tls.Client(conn, config)
		if err := encrypted.HandshakeContext(ctx); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		return encrypted, nil
	}
	conn, err := valkey.NewClient(opts)
	if err == nil {
		defer conn.Close()
		err = conn.Do(ctx, conn.B().Arbitrary("ACL", "SETUSER").Keys(workload.StoreUser).
			Args(append([]string{"on", "resetpass"}, c.AcceptedHashes()...)...).Build()).Error()
	}
	if answer, ok := valkey.IsValkeyErr(err); ok && strings.HasPrefix(answer.Error(), "WRONGPASS") {
		return errAdminRefused
	}
	return err
}

// The class of errors of PostgreSQL about who one is: 28000 and 28P01.
const invalidAuthorization = "28"

// setPostgresPassword makes the role and the database of the store where they are not, and
// gives the role its password. Connections that are open stay.
func (d *Deployer) setPostgresPassword(ctx context.Context, s *v1alpha1.IdempotencyStore, c workload.Credentials) (err error) {
	config, err := pgx.ParseConfig("host=unused user=unused dbname=unused sslmode=disable")
	if err != nil {
		return err
	}
	user, password := c.Admin()
	config.Host, config.Port = workload.Host(s), workload.PostgresPort
	config.User, config.Password, config.Database = user, password, workload.PostgresSuperuser
	config.Fallbacks, config.ConnectTimeout = nil, acceptTimeout
	// What is asked here has a password in it: it is kept from the server's log.
	config.RuntimeParams = map[string]string{
		"application_name": "holdfast-operator", "log_statement": "none", "log_min_error_statement": "panic", "log_min_duration_statement": "-1",
	}
	// The name goes to the dialler as it is.
	config.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		return d.dial(ctx, s.Namespace, network, address)
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && strings.HasPrefix(pg.Code, invalidAuthorization) {
		return errAdminRefused
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()

	var statements []string
	// format() quotes names and texts. A statement that makes something is not in the list where it is there.
	rows, err := conn.Query(ctx, `
		SELECT format('CREATE ROLE %I', $1::text) WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = $1::text)
		UNION ALL SELECT format('ALTER ROLE %I WITH LOGIN NOSUPERUSER NOCREATEROLE NOCREATEDB NOREPLICATION NOBYPASSRLS PASSWORD %L', $1::text, $2::text)
		UNION ALL SELECT format('CREATE DATABASE %I OWNER %I', $1::text, $1::text) WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = $1::text)
		UNION ALL SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', $1::text)`, workload.StoreUser, c.Newest())
	if err == nil {
		statements, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	for _, statement := range statements {
		if err == nil {
			_, err = conn.Exec(ctx, statement)
		}
	}
	return err
}
