// This file is a PostgreSQL server of one node: a commit is on the disk before it is
// answered, whatever a session or the database's own settings would have.

package workload

import (
	_ "embed"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
)

const (
	// PostgresImage is the one where the spec names none.
	PostgresImage = "docker.io/library/postgres:17"
	// PostgresPort is where the server listens.
	PostgresPort = 5432

	// PostgresSuperuser is used by the operator, for the role of the store, and by a person with kubectl exec.
	PostgresSuperuser = "postgres"

	postgresData  = "/var/lib/postgresql/data"
	postgresGrace = 120
	mebi          = 1 << 20
)

//go:embed files/postgres-start.sh
var postgresStart string

//go:embed files/postgres-probe.sh
var postgresProbe string

//go:embed files/pg_hba.conf
var postgresAccess string

// postgresArguments win over postgresql.conf and ALTER SYSTEM, so that no durable volume is
// made to forget by a setting that lies in it.
func postgresArguments(memory, storage int64) []string {
	settings := []string{
		"fsync=on", "full_page_writes=on", "synchronous_commit=on",
		"password_encryption=scram-sha-256",
		"hba_file=" + contentDir + "/pg_hba.conf",
		"listen_addresses=*",
		"max_connections=200",
		// The log of writes must fit beside the data.
		fmt.Sprintf("max_wal_size=%dMB", min(max(storage/4/mebi, 64), 1024)),
		"min_wal_size=32MB",
	}
	if memory > 0 {
		settings = append(settings, fmt.Sprintf("shared_buffers=%dMB", max(memory/4/mebi, 16)))
	}
	var args []string
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	return args
}

func renderPostgres(in Inputs, k kind) (map[string]string, *corev1ac.PodSpecApplyConfiguration, error) {
	memory, err := memoryLimit(k.resources)
	if err != nil {
		return nil, nil, err
	}
	resources, err := amounts(k.resources)
	if err != nil {
		return nil, nil, err
	}
	size, err := resource.ParseQuantity(k.storage.Size)
	if err != nil {
		return nil, nil, fmt.Errorf("storage.size %q: %w", k.storage.Size, err)
	}
	content := map[string]string{
		"pg_hba.conf": postgresAccess,
		"lock.sh":     lockScript,
		"start.sh":    postgresStart,
		"probe.sh":    postgresProbe,
	}
	env := func(name, value string) *corev1ac.EnvVarApplyConfiguration {
		return corev1ac.EnvVar().WithName(name).WithValue(value)
	}
	c := corev1ac.Container().WithImage(k.image).
		WithCommand("sh", contentDir+"/start.sh").
		WithArgs(append([]string{"postgres"}, postgresArguments(memory, size.Value())...)...).
		WithEnv(
			// A directory in the volume: the volume's own is not the server's to own.
			env("PGDATA", postgresData+"/pgdata"),
			env("POSTGRES_USER", PostgresSuperuser),
			env("POSTGRES_DB", PostgresSuperuser),
			env("POSTGRES_PASSWORD_FILE", secretDir+"/"+KeyAdminPassword),
			// The order of texts must not change with the image's C library; damaged pages must be noticed.
			env("POSTGRES_INITDB_ARGS", "--encoding=UTF8 --locale=C --data-checksums"),
		).
		WithPorts(corev1ac.ContainerPort().WithName(k.name).WithProtocol(corev1.ProtocolTCP).WithContainerPort(k.port)).
		WithResources(resources).
		WithVolumeMounts(
			mount(volume, postgresData, false), mount("content", contentDir, true), mount("secret", secretDir, true),
			mount("run", "/var/run/postgresql", false), mount("tmp", "/tmp", false),
		)
	probes(c, "probe.sh", 300)
	return content, pod(postgresGrace, c,
		contentVolume(in.Store), secretVolume(SecretName(in.Store), "secret", KeyAdminPassword), scratch("run"), scratch("tmp")), nil
}
