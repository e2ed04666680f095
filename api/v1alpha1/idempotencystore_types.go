// IdempotencyStore declares where records live.

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RotatePasswordAnnotation asks for a new password of a deployed store: each new value of it makes one.
const RotatePasswordAnnotation = GroupName + "/rotate-password"

// IdempotencyStoreSpec says which store keeps the records. Exactly one member is set; which one cannot
// change, since the records would be left behind. Its settings can.
//
// +kubebuilder:validation:XValidation:rule="[has(self.embedded), has(self.redis), has(self.postgres)].exists_one(x, x)",message="exactly one kind of store must be set: embedded, redis or postgres"
// +kubebuilder:validation:XValidation:rule="has(self.embedded) == has(oldSelf.embedded) && has(self.redis) == has(oldSelf.redis) && has(self.postgres) == has(oldSelf.postgres)",message="the kind of store cannot change: the records would be left behind. Make another IdempotencyStore"
// +kubebuilder:validation:XValidation:rule="!has(self.forgetEpoch) || has(self.acceptEpoch) && self.forgetEpoch == self.acceptEpoch",message="forgetEpoch must be the same as acceptEpoch"
type IdempotencyStoreSpec struct {
	// embedded keeps the records in a file inside the operator's own single process: the store for a first run
	// and for one replica. The file is the one that the process was started with.
	// +optional
	Embedded *EmbeddedStore `json:"embedded,omitempty"`

	// redis keeps the records in Redis or Valkey, 7.0 or later, on one durable node.
	// +optional
	Redis *RedisStore `json:"redis,omitempty"`

	// postgres keeps the records in PostgreSQL, 15 or later, which may replicate them synchronously to several nodes.
	// +optional
	Postgres *PostgresStore `json:"postgres,omitempty"`

	// durabilityPolicy says what happens while the store could lose an acknowledged write, as status.durability tells.
	// Require: calls of Mutating tools are refused. Warn: they are served, and a payment that was forgotten can be made twice.
	// Effective value when absent: Require.
	// +optional
	DurabilityPolicy DurabilityPolicy `json:"durabilityPolicy,omitempty"`

	// acceptEpoch accepts that the memory of this epoch is lost, and goes on without it: the value is that of status.epoch.
	// For the overlap window of each tool's budget, payments that the store does not know are then held, because they may have
	// been made before. It says nothing of any later loss.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	AcceptEpoch string `json:"acceptEpoch,omitempty"`

	// forgetEpoch says, with the same value as acceptEpoch, that no payment of that memory needs to be looked for: none is held for
	// having perhaps been made before. What it had paid can then be paid again.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	ForgetEpoch string `json:"forgetEpoch,omitempty"`

	// acceptClock accepts a jump of the store's clock by more than an hour, when the time that it shows now is the right one.
	// The value is the one that the condition Ready names. It says nothing of any later jump.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	AcceptClock string `json:"acceptClock,omitempty"`
}

// DurabilityPolicy says what happens while a store could lose an acknowledged write.
//
// +kubebuilder:validation:Enum=Require;Warn
type DurabilityPolicy string

const (
	// DurabilityRequire refuses calls of Mutating tools meanwhile.
	DurabilityRequire DurabilityPolicy = "Require"
	// DurabilityWarn serves them all the same.
	DurabilityWarn DurabilityPolicy = "Warn"
)

// EmbeddedStore has no settings: the place of the file belongs to the process, not to the namespace.
type EmbeddedStore struct{}

// RedisStore is a Redis or Valkey server. Exactly one member is set; which one cannot change.
//
// +kubebuilder:validation:XValidation:rule="has(self.deploy) != has(self.external)",message="exactly one of deploy and external must be set"
// +kubebuilder:validation:XValidation:rule="has(self.deploy) == has(oldSelf.deploy)",message="deploy and external cannot be exchanged: the records would be left behind. Make another IdempotencyStore"
type RedisStore struct {
	// deploy has the operator run a Valkey server of one node, with its volume, in this namespace.
	// +optional
	Deploy *RedisDeployment `json:"deploy,omitempty"`

	// external is a server that somebody else runs.
	// +optional
	External *ExternalRedis `json:"external,omitempty"`
}

// RedisDeployment is a server that the operator runs.
type RedisDeployment struct {
	// image is a container image of Valkey 7.2 or later, or of Redis 7.0 or later. Effective value when absent: docker.io/valkey/valkey:8.1.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$`
	Image string `json:"image,omitempty"`

	// storage is the volume that keeps the records. It outlives this object.
	// +required
	Storage StoreStorage `json:"storage"`

	// resources are what the server may use. Redis keeps every record in memory: about 2 KiB for each settled payment, and its answer.
	// Effective value when absent: requests of 100m and 256Mi, and a limit of 512Mi of memory.
	// +optional
	Resources *StoreResources `json:"resources,omitempty"`

	// tls has the server speak TLS alone. When absent, the password and the records go over the pod network as they are,
	// behind a NetworkPolicy that lets only the operator and the gateways in.
	// +optional
	TLS *ServerTLS `json:"tls,omitempty"`
}

// ServerTLS says which certificate a deployed server shows.
type ServerTLS struct {
	// secretRef names a Secret of this namespace with tls.crt, tls.key and ca.crt, as cert-manager makes them. The certificate must be for
	// the client Service, NAME-redis.NAMESPACE.svc. The Secret must carry the label guardrails.holdfast.dev/credentials: "true", and the
	// operator's ServiceAccounts must be allowed to get it: they verify the server with ca.crt.
	// +required
	SecretRef SecretReference `json:"secretRef"`
}

// SecretReference names a Secret in the same namespace.
type SecretReference struct {
	// name of the Secret, in the namespace of the object that refers to it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// StoreStorage is the volume of a deployed store.
//
// +kubebuilder:validation:XValidation:rule="has(self.className) == has(oldSelf.className) && (!has(self.className) || self.className == oldSelf.className)",message="className cannot change: the volume exists already"
type StoreStorage struct {
	// size of the volume, such as 10Gi. It can be raised, where the StorageClass allows it, and never lowered.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="isQuantity(self) && quantity(self).compareTo(quantity('64Mi')) >= 0",message="size must be a quantity of at least 64Mi, such as 10Gi"
	// +kubebuilder:validation:XValidation:rule="!isQuantity(self) || !isQuantity(oldSelf) || quantity(self).compareTo(quantity(oldSelf)) >= 0",message="size cannot be lowered: a volume does not shrink"
	Size string `json:"size"`

	// className names the StorageClass. Effective value when absent: the cluster's default.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	ClassName string `json:"className,omitempty"`
}

// StoreResources are what a deployed server may use.
type StoreResources struct {
	// requests are what is set aside for it.
	// +optional
	Requests *ResourceAmounts `json:"requests,omitempty"`

	// limits are what it gets at most. Without a limit of memory a Redis has no maxmemory.
	// +optional
	Limits *ResourceAmounts `json:"limits,omitempty"`
}

// ResourceAmounts are amounts of CPU and memory.
type ResourceAmounts struct {
	// cpu is an amount such as 500m.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="isQuantity(self) && quantity(self).compareTo(quantity('10m')) >= 0",message="cpu must be a quantity of at least 10m, such as 500m"
	CPU string `json:"cpu,omitempty"`

	// memory is an amount such as 1Gi.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="isQuantity(self) && quantity(self).compareTo(quantity('64Mi')) >= 0",message="memory must be a quantity of at least 64Mi, such as 1Gi"
	Memory string `json:"memory,omitempty"`
}

// ExternalRedis is a server that somebody else runs: Redis or Valkey, 7.0 or later, or a cluster of them. A server with asynchronous
// replicas that take over by themselves loses acknowledged writes, which is a finding of status.durability.
type ExternalRedis struct {
	// addresses are host:port of the server, or of some nodes of a cluster.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Addresses []HostPort `json:"addresses"`

	// credentialsFrom names a Secret with the key password and, unless the user is default, the key username. It is read at each
	// connection, so that a password can be rotated. When absent, the server asks for none. The Secret must carry the label
	// guardrails.holdfast.dev/credentials: "true", and the operator's ServiceAccounts must be allowed to get it.
	// +optional
	CredentialsFrom *SecretReference `json:"credentialsFrom,omitempty"`

	// tls has the connections encrypted, and the server verified. When absent, the password and the records go over the network as they are.
	// +optional
	TLS *ClientTLS `json:"tls,omitempty"`
}

// HostPort is the address of a server.
//
// +kubebuilder:validation:MinLength=3
// +kubebuilder:validation:MaxLength=260
// +kubebuilder:validation:Pattern=`^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$`
type HostPort string

// ClientTLS says how a server is verified.
type ClientTLS struct {
	// caFrom names the key of a Secret that holds the certificates of the authorities, in PEM. It must carry the label
	// guardrails.holdfast.dev/credentials: "true". Effective value when absent: those that the operator's image trusts.
	// +optional
	CAFrom *SecretKeyReference `json:"caFrom,omitempty"`

	// serverName is the name in the server's certificate. Effective value when absent: the host that is dialled.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`
	ServerName string `json:"serverName,omitempty"`
}

// PostgresStore is a PostgreSQL database. Exactly one member is set; which one cannot change.
//
// +kubebuilder:validation:XValidation:rule="has(self.deploy) != has(self.external)",message="exactly one of deploy and external must be set"
// +kubebuilder:validation:XValidation:rule="has(self.deploy) == has(oldSelf.deploy)",message="deploy and external cannot be exchanged: the records would be left behind. Make another IdempotencyStore"
type PostgresStore struct {
	// deploy has the operator run a PostgreSQL server of one node, with its volume, in this namespace. For several nodes use external.
	// +optional
	Deploy *PostgresDeployment `json:"deploy,omitempty"`

	// external is a database that somebody else runs: CloudNativePG, or a managed one.
	// +optional
	External *ExternalPostgres `json:"external,omitempty"`
}

// PostgresDeployment is a server that the operator runs.
type PostgresDeployment struct {
	// image is a container image of PostgreSQL 15 or later that is started as the official one is, by POSTGRES_USER, POSTGRES_DB,
	// POSTGRES_PASSWORD_FILE and PGDATA. A new major version needs its own migration of the volume.
	// Effective value when absent: docker.io/library/postgres:17.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$`
	Image string `json:"image,omitempty"`

	// storage is the volume that keeps the records. It outlives this object.
	// +required
	Storage StoreStorage `json:"storage"`

	// resources are what the server may use. Effective value when absent: requests of 250m and 256Mi, and a limit of 1Gi of memory.
	// +optional
	Resources *StoreResources `json:"resources,omitempty"`
}

// ExternalPostgres is a database that somebody else runs.
type ExternalPostgres struct {
	// dsnFrom names the key of a Secret that holds the DSN: a postgres:// URL or keyword=value pairs with host, port, user, password,
	// dbname and sslmode. The Secret must carry the label guardrails.holdfast.dev/credentials: "true", and the operator's
	// ServiceAccounts must be allowed to get it. It is read again when a connection is refused, so that a password can be rotated.
	// +required
	DSNFrom SecretKeyReference `json:"dsnFrom"`

	// caFrom names the key of a Secret that holds the certificates of the authorities for sslmode verify-ca and verify-full, in PEM.
	// It must carry the label guardrails.holdfast.dev/credentials: "true". Effective value when absent: those that the operator's image trusts.
	// +optional
	CAFrom *SecretKeyReference `json:"caFrom,omitempty"`

	// schema holds the store and nothing else; several stores in one database have one each. Effective value when absent: holdfast.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z_][a-z0-9_]*$`
	// +kubebuilder:validation:XValidation:rule="!self.startsWith('pg_') && self != 'information_schema' && self != 'public'",message="schema must not be one of PostgreSQL's own, nor public"
	Schema string `json:"schema,omitempty"`

	// cloudNativePG names the Cluster of CloudNativePG, in this namespace, that the DSN leads to: its spec says whether synchronous
	// replication is required or only preferred, which the server itself does not know.
	// +optional
	CloudNativePG *ClusterReference `json:"cloudNativePG,omitempty"`
}

// ClusterReference names a Cluster of postgresql.cnpg.io in the same namespace.
type ClusterReference struct {
	// name of the Cluster, in the namespace of the IdempotencyStore.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// DurabilityClass says what an acknowledged write survives.
//
// +kubebuilder:validation:Enum=AtRisk;SingleNode;Replicated
type DurabilityClass string

const (
	// DurabilityAtRisk: an acknowledged write can be lost; the findings say how.
	DurabilityAtRisk DurabilityClass = "AtRisk"
	// DurabilitySingleNode: acknowledged writes are on one disk, and survive everything but its loss.
	DurabilitySingleNode DurabilityClass = "SingleNode"
	// DurabilityReplicated: acknowledged writes are on the disks of at least two nodes.
	DurabilityReplicated DurabilityClass = "Replicated"
)

// StoreDurability is how durable the store was found to be.
type StoreDurability struct {
	// class says what an acknowledged write survives.
	// +required
	Class DurabilityClass `json:"class"`

	// findings are what is to be mended, in plain words.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Findings []DurabilityFinding `json:"findings,omitempty"`
}

// FindingSeverity says what a finding does.
//
// +kubebuilder:validation:Enum=Loses;Warns
type FindingSeverity string

const (
	// FindingLoses: an acknowledged write can be lost, or that cannot be ruled out. Durable is False.
	FindingLoses FindingSeverity = "Loses"
	// FindingWarns: nothing is lost yet.
	FindingWarns FindingSeverity = "Warns"
)

// DurabilityFinding is something to be mended.
type DurabilityFinding struct {
	// reason names the finding in one word.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason"`

	// severity says whether an acknowledged write can be lost.
	// +required
	Severity FindingSeverity `json:"severity"`

	// message says what was found and what to do.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// IdempotencyStoreStatus is what the operator has seen of the store.
type IdempotencyStoreStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// epoch names the store's memory. It is written at the store's first use, and another epoch means another memory. After a loss
	// it is the epoch of the memory that is lost, until that is accepted.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Epoch string `json:"epoch,omitempty"`

	// durability is how durable the store was found to be when it was last looked at.
	// +optional
	Durability *StoreDurability `json:"durability,omitempty"`

	// conditions are Ready, Durable and EpochAccepted, Deployed of a store that the operator runs, and Stalled or Reconciling only while they are true.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// IdempotencyStore declares where records live.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=idem,categories=guardrails
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Durability",type=string,JSONPath=`.status.durability.class`
// +kubebuilder:printcolumn:name="Epoch",type=string,JSONPath=`.status.epoch`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 40",message="the name of an IdempotencyStore has at most 40 characters"
type IdempotencyStore struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec says which store keeps the records.
	// +required
	Spec IdempotencyStoreSpec `json:"spec"`

	// status is what the operator has seen of the store.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Durable", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "EpochAccepted", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status IdempotencyStoreStatus `json:"status,omitzero"`
}

// IdempotencyStoreList is a list of IdempotencyStores.
//
// +kubebuilder:object:root=true
type IdempotencyStoreList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []IdempotencyStore `json:"items"`
}
