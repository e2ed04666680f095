// This file is a Redis or Valkey server of one node: every write is on the disk before it
// is answered, nothing is evicted, and clients have no more than the commands of a store.

package workload

import (
	_ "embed"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	// RedisImage is the one where the spec names none.
	RedisImage = "docker.io/valkey/valkey:8.1"
	// RedisPort is where the server listens, with TLS or without.
	RedisPort = 6379

	// memoryShare is the part of the memory limit, in percent, that the data may take. The rest is
	// for buffers, and for the pages that change while the log is rewritten.
	redisData = "/data"

	memoryShare = 75
	redisGrace  = 60
)

//go:embed files/redis-start.sh
var redisStart string

//go:embed files/redis-probe.sh
var redisProbe string

// The users of the server and what each may do. The store's own may neither configure the
// server nor wipe it; the operator's only sets passwords; the probe only asks.
const (
	redisAdmin     = "operator"
	redisProbeUser = "probe"

	storeRights = "~* resetchannels +@all -@dangerous +info +role +config|get"
	adminRights = "resetkeys resetchannels -@all +auth +hello +ping +acl|setuser"
	probeRights = "resetkeys resetchannels -@all +auth +hello +ping +info"
	// logRights are those of the user default, as whom nobody connects.
	logRights = "~* &* +@all"
)

// rewriteMinSize is read again in a few seconds.
const rewriteMinSize = 256 << 20

// redisConf is the server's configuration.
func redisConf(deploy *v1alpha1.RedisDeployment, maxmemory int64) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Every write is on the disk before it is answered, and nothing is ever forgotten to make room.")
	line("dir " + redisData)
	line("appendonly yes")
	line("appendfsync always")
	line("no-appendfsync-on-rewrite no")
	line("maxmemory-policy noeviction")
	if maxmemory > 0 {
		line("maxmemory %d", maxmemory)
		line("# The log is written anew when it has doubled, but a short one costs more to rewrite than to read.")
		line("auto-aof-rewrite-min-size %d", min(rewriteMinSize, maxmemory))
	}
	line("# What is remembered is mostly hashes: to compress it takes half of the rewrite's time, and saves a tenth of the disk.")
	line("rdbcompression no")
	line("# A write that was cut off by a crash was answered to nobody: the log is read up to it.")
	line("aof-load-truncated yes")
	line("# The log alone is the memory: no snapshots beside it.")
	line(`save ""`)
	line("# The users, with hashes for passwords. What each may do is here too, because the file is read at the start alone:")
	line("# other rights are another content, and have the pod begin anew; another password is told to the server as it runs.")
	line("#   default, which is off: %s", logRights)
	line("#   %s: %s", StoreUser, storeRights)
	line("#   %s: %s", redisAdmin, adminRights)
	line("#   %s: %s", redisProbeUser, probeRights)
	line("aclfile %s/%s", secretDir, KeyUsersACL)
	line("protected-mode no")
	if deploy.TLS != nil {
		line("port 0")
		line("tls-port %d", RedisPort)
		line("tls-cert-file %s/%s", tlsDir, corev1.TLSCertKey)
		line("tls-key-file %s/%s", tlsDir, corev1.TLSPrivateKeyKey)
		line("tls-ca-cert-file %s/%s", tlsDir, KeyCA)
		line("tls-auth-clients no")
	} else {
		line("port %d", RedisPort)
	}
	return b.String()
}

func renderRedis(in Inputs, k kind) (map[string]string, *corev1ac.PodSpecApplyConfiguration, error) {
	deploy := in.Store.Spec.Redis.Deploy
	limit, err := memoryLimit(k.resources)
	if err != nil {
		return nil, nil, err
	}
	resources, err := amounts(k.resources)
	if err != nil {
		return nil, nil, err
	}
	content := map[string]string{
		"redis.conf": redisConf(deploy, limit*memoryShare/100),
		"lock.sh":    lockScript,
		"start.sh":   redisStart,
		"probe.sh":   redisProbe,
	}
	c := corev1ac.Container().WithImage(k.image).
		WithCommand("sh", contentDir+"/start.sh").
		WithWorkingDir(redisData).
		WithPorts(corev1ac.ContainerPort().WithName(k.name).WithProtocol(corev1.ProtocolTCP).WithContainerPort(k.port)).
		WithResources(resources).
		WithVolumeMounts(mount(volume, redisData, false), mount("content", contentDir, true), mount("secret", secretDir, true))
	volumes := []*corev1ac.VolumeApplyConfiguration{
		contentVolume(in.Store), secretVolume(SecretName(in.Store), "secret", KeyUsersACL, KeyProbePassword),
	}
	if deploy.TLS != nil {
		// The probe speaks with its own container: there is nobody to be verified.
		c.WithEnv(corev1ac.EnvVar().WithName("PROBE_TLS").WithValue("--tls --insecure"))
		c.WithVolumeMounts(mount("tls", tlsDir, true))
		volumes = append(volumes, secretVolume(deploy.TLS.SecretRef.Name, "tls", corev1.TLSCertKey, corev1.TLSPrivateKeyKey, KeyCA))
	}
	probes(c, "probe.sh", 120)
	return content, pod(redisGrace, c, volumes...), nil
}
