// AgentTool declares something that an agent may call: where it is sent, and what makes two calls the same payment.

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CredentialsLabel must be on a Secret, with the value "true", before a tool's credentials are read from it.
// Whoever can write an AgentTool can name any Secret; the label is the Secret's own consent.
const CredentialsLabel = GroupName + "/credentials"

// ToolEffect says whether a call may move money.
//
// +kubebuilder:validation:Enum=Mutating;ReadOnly
type ToolEffect string

const (
	// EffectMutating is a tool whose calls move something: every one of them is an intent.
	EffectMutating ToolEffect = "Mutating"
	// EffectReadOnly is a tool whose calls move nothing: they are passed through.
	EffectReadOnly ToolEffect = "ReadOnly"
)

// BudgetReference names an IntentBudget in the same namespace.
type BudgetReference struct {
	// name of the IntentBudget, in the namespace of the AgentTool.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// HTTPMethod is a request method that a tool may be called with.
//
// +kubebuilder:validation:Enum=GET;HEAD;POST;PUT;PATCH;DELETE
type HTTPMethod string

// PathSuffix is a path that a caller may append to the tool's own.
//
// +kubebuilder:validation:MinLength=2
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:Pattern=`^(/(\*|[A-Za-z0-9_~!$&'()+,;=:@-][A-Za-z0-9._~!$&'()+,;=:@-]*))+$`
type PathSuffix string

// RequestHeader is the name of a request header, in lower case, that goes upstream as the caller sent it.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=64
// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9_]*[a-z0-9])?$`
type RequestHeader string

// SecretKeyReference names one key of a Secret in the same namespace.
type SecretKeyReference struct {
	// name of the Secret, in the namespace of the object that refers to it. It must carry the label guardrails.holdfast.dev/credentials: "true",
	// and the operator's ServiceAccount must be allowed to get it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`

	// key of the Secret whose value is the credential.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key"`
}

// UpstreamCredentials says which credential goes upstream and in which header.
type UpstreamCredentials struct {
	// secretRef names the key of a Secret, in this namespace, that holds the credential.
	// +required
	SecretRef SecretKeyReference `json:"secretRef"`

	// header is the request header that carries the credential, such as Authorization.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9_]*[A-Za-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="!(self.lowerAscii() in ['host', 'connection', 'content-length', 'content-type', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'expect'])",message="header must not be one that HTTP itself needs"
	Header string `json:"header"`

	// prefix is written before the credential, such as "Bearer " with its blank. Effective value when absent: nothing.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[ -~]*$`
	Prefix string `json:"prefix,omitempty"`
}

// HTTPUpstream is a tool's endpoint over HTTP.
type HTTPUpstream struct {
	// url is the tool's endpoint: http or https, host, and a path without user information, query or fragment.
	// It is taken as it is: no expression in it is evaluated.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:Pattern=`^https?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*$`
	URL string `json:"url"`

	// methods are the request methods that a caller may use.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=6
	Methods []HTTPMethod `json:"methods"`

	// suffixes are the paths that a caller may append to url, each beginning with a slash. The segment * stands for exactly one
	// segment that is not empty and neither . nor .. Effective value when absent: none, so that only url itself can be called.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	Suffixes []PathSuffix `json:"suffixes,omitempty"`

	// timeout is how long one attempt may take, from its first byte to the last byte of the answer.
	// Between 100ms and 5m; effective value when absent: 10s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('5m')",message="timeout must be between 100ms and 5m"
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// settleAfter is the longest time from the send's deadline until a payment is visible in the provider's ledger or never will be:
	// queues, proxies, bytes that were acknowledged but not read, a 202 that is still processed. An attempt whose outcome is unknown can be
	// released or marked as failed only after it. Required for a Mutating tool, since nobody but the tool's owner can know it; between 100ms and 720h.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('720h')",message="settleAfter must be between 100ms and 720h"
	SettleAfter *metav1.Duration `json:"settleAfter,omitempty"`

	// requestHeaders are the headers, in lower case, that go upstream as the caller sent them; all others stay behind. The caller's own
	// credentials and hop-by-hop headers can never be among them. Effective value when absent: accept and content-type.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.all(h, !(h in ['authorization', 'proxy-authorization', 'cookie', 'host', 'connection', 'proxy-connection', 'content-length', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'expect']) && !h.startsWith('holdfast-') && !h.startsWith('impersonate-'))",message="requestHeaders must not name the caller's credentials (authorization, cookie, impersonate-*), a hop-by-hop header, or holdfast-*"
	RequestHeaders []RequestHeader `json:"requestHeaders,omitempty"`

	// credentialsFrom is the credential that goes upstream with every call. When absent, none does.
	// +optional
	CredentialsFrom *UpstreamCredentials `json:"credentialsFrom,omitempty"`
}

// ToolUpstream is the tool's own endpoint. Exactly one member is set.
//
// +kubebuilder:validation:XValidation:rule="[has(self.http), has(self.local)].filter(x, x).size() == 1",message="exactly one kind of upstream must be set: http or local"
type ToolUpstream struct {
	// http is an endpoint over HTTP.
	// +optional
	HTTP *HTTPUpstream `json:"http,omitempty"`

	// local says that the tool runs inside its agent, which claims an attempt before it runs and settles it afterwards. Only for a Mutating tool.
	// +optional
	Local *LocalUpstream `json:"local,omitempty"`
}

// ResponseCache says how long an answer of a ReadOnly tool may be served again.
type ResponseCache struct {
	// ttl is how long a caller's own earlier answer is served again for the same call. Between 1s and 1h.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('1h')",message="ttl must be between 1s and 1h"
	TTL metav1.Duration `json:"ttl"`
}

// Expression is a CEL expression over the variable call: method, path, query, header, body, session, index and agent.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
type Expression string

// JSONPointer is a pointer of RFC 6901 into the JSON body of the call.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:Pattern=`^(/([^/~]|~0|~1)+)+$`
type JSONPointer string

// AmountUnit says what an amount counts.
//
// +kubebuilder:validation:Enum=Major;Minor
type AmountUnit string

const (
	// UnitMajor counts the currency itself: 49.99 USD is 49.99.
	UnitMajor AmountUnit = "Major"
	// UnitMinor counts the currency's smallest unit: 49.99 USD is 4999.
	UnitMinor AmountUnit = "Minor"
)

// AmountExpressions say how much a call moves.
type AmountExpressions struct {
	// value yields the amount, a number or a decimal string.
	// +required
	Value Expression `json:"value"`

	// currency yields the currency, an ISO 4217 code; for a token its name and exponent, such as USDC/6.
	// +required
	Currency Expression `json:"currency"`

	// unit says what value counts: Major, the currency itself, or Minor, its smallest unit.
	// +required
	Unit AmountUnit `json:"unit"`
}

// ToolIdentity says what makes two calls of a tool the same payment.
type ToolIdentity struct {
	// intentID are the sources of the intent ID; the first that yields a value names the intent. A call for which none does is refused.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	IntentID []Expression `json:"intentID"`

	// scope says what the money is for. Each expression yields one path or a list of them; a call whose scope comes out empty or in error is refused.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Scope []Expression `json:"scope"`

	// lineage yields the path that says where the intent comes from. When absent, or in error, the intent has no lineage.
	// +optional
	Lineage Expression `json:"lineage,omitempty"`

	// amount says how much a call moves. When absent, calls have no amount.
	// +optional
	Amount *AmountExpressions `json:"amount,omitempty"`

	// recipient yields who is paid. When absent, calls have no recipient.
	// +optional
	Recipient Expression `json:"recipient,omitempty"`

	// volatile are the fields of the body that may differ between two sends of one intent, such as a timestamp. They are left out of the fingerprint.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	Volatile []JSONPointer `json:"volatile,omitempty"`

	// addresses are the fields of the body whose letter case means nothing, such as a hexadecimal address.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	Addresses []JSONPointer `json:"addresses,omitempty"`

	// registration is Required if only intents that were registered are sent: with a PaymentIntent, or with PUT at the intent's URL.
	// Effective value when absent: Optional.
	// +optional
	Registration RegistrationMode `json:"registration,omitempty"`
}

// RegistrationMode says whether intents must be registered.
//
// +kubebuilder:validation:Enum=Optional;Required
type RegistrationMode string

const (
	// RegistrationOptional sends also what was not registered.
	RegistrationOptional RegistrationMode = "Optional"
	// RegistrationRequired refuses what was not registered.
	RegistrationRequired RegistrationMode = "Required"
)

// NoKey says that the upstream takes no key. It has no settings.
type NoKey struct{}

// ProviderKey says how the upstream receives the stable key of an intent. Exactly one member is set.
//
// +kubebuilder:validation:XValidation:rule="[has(self.header), has(self.argument), has(self.none)].filter(x, x).size() == 1",message="exactly one of header, argument and none must be set"
type ProviderKey struct {
	// header is the request header that carries the key, such as Idempotency-Key.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9_]*[A-Za-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="!(self.lowerAscii() in ['authorization', 'proxy-authorization', 'cookie', 'host', 'connection', 'content-length', 'content-type', 'content-encoding', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'keep-alive', 'expect', 'accept'])",message="header must be one that is free to carry a key"
	Header string `json:"header,omitempty"`

	// argument is the place in the JSON body, a pointer of RFC 6901, that carries the key.
	// +optional
	Argument JSONPointer `json:"argument,omitempty"`

	// none says that the upstream takes no key.
	// +optional
	None *NoKey `json:"none,omitempty"`
}

// InFlightMode says what a call gets while another one of its intent is in flight.
//
// +kubebuilder:validation:Enum=Wait;Reject
type InFlightMode string

const (
	// InFlightWait lets the call wait for the answer.
	InFlightWait InFlightMode = "Wait"
	// InFlightReject answers IN_FLIGHT at once.
	InFlightReject InFlightMode = "Reject"
)

// InFlightSpec says what a call gets while another one of its intent is in flight.
//
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'Reject' || !has(self.timeout)",message="timeout is for mode Wait: remove it, or set mode to Wait"
type InFlightSpec struct {
	// mode is Wait, to wait for the answer, or Reject, to be answered IN_FLIGHT at once. Effective value when absent: Wait.
	// +optional
	Mode InFlightMode `json:"mode,omitempty"`

	// timeout is how long a call waits before it is answered IN_FLIGHT. Between 100ms and 5m; effective value when absent: 10s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('5m')",message="timeout must be between 100ms and 5m"
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// retryAfter is what an IN_FLIGHT answer tells the caller to wait, in whole seconds. Between 1s and 5m; effective value when absent: 2s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('5m')",message="retryAfter must be between 1s and 5m"
	RetryAfter *metav1.Duration `json:"retryAfter,omitempty"`
}

// RecordSpec bounds what the record keeps of an answer.
type RecordSpec struct {
	// maxBodyBytes is how much of an answer's body is kept, such as 1Mi; of a longer one the record keeps the start, the size and the digest,
	// and a replay says so. Between 1Ki and 4Mi; effective value when absent: 1Mi.
	// +optional
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).compareTo(quantity('1Ki')) >= 0 && quantity(string(self)).compareTo(quantity('4Mi')) <= 0",message="maxBodyBytes must be between 1Ki and 4Mi"
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).isInteger()",message="maxBodyBytes must be a whole number of bytes"
	MaxBodyBytes *resource.Quantity `json:"maxBodyBytes,omitempty"`
}

// IdempotencySpec says how long an answer is replayed, and how the upstream can recognise an intent.
type IdempotencySpec struct {
	// ttl is how long an answer is replayed, from settlement; after it, the same intent ID is held as KeyExpired.
	// Between 1m and 8760h; effective value when absent: 48h.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1m') && duration(self) <= duration('8760h')",message="ttl must be between 1m and 8760h"
	TTL *metav1.Duration `json:"ttl,omitempty"`

	// key says how the upstream receives the stable key of an intent.
	// +required
	Key ProviderKey `json:"key,omitzero"`

	// providerDeduplicates says that the provider moves money once for a key, and for how long. Only with unknownOutcome Resume, which needs it;
	// when absent, the provider counts as one that does not deduplicate.
	// +optional
	ProviderDeduplicates *ProviderDeduplication `json:"providerDeduplicates,omitempty"`

	// inFlight says what a call gets while another one of its intent is in flight. When absent, each of its fields has its effective value.
	// +optional
	InFlight *InFlightSpec `json:"inFlight,omitempty"`

	// record bounds what is kept of an answer. When absent, each of its fields has its effective value.
	// +optional
	Record *RecordSpec `json:"record,omitempty"`
}

// QueueSpec says how long calls may wait for a slot.
type QueueSpec struct {
	// max is how many calls may wait in one gateway; 0 lets none wait. Between 0 and 1000; effective value when absent: 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Max *int32 `json:"max,omitempty"`

	// timeout is how long a call waits before it is refused. Between 100ms and 5m; effective value when absent: 5s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('5m')",message="timeout must be between 100ms and 5m"
	Timeout *metav1.Duration `json:"timeout,omitempty"`
}

// ConcurrencySpec bounds how many intents of a tool are in flight at once, in all gateways together. A slot is held as long as its
// attempt's lease, so that a gateway that dies costs none for longer.
//
// +kubebuilder:validation:XValidation:rule="has(self.maxInFlight) || has(self.perScope)",message="maxInFlight or perScope must be set"
type ConcurrencySpec struct {
	// maxInFlight is how many intents of the tool may be in flight at once. Between 1 and 10000; when absent, as many as come.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	MaxInFlight *int32 `json:"maxInFlight,omitempty"`

	// perScope is how many intents of the tool may be in flight at once for one and the same path of their scopes. The overlap check holds all
	// but the first of them before, so it is for those that were released while others are in flight. Between 1 and 10000; when absent, as
	// many as were released.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	PerScope *int32 `json:"perScope,omitempty"`

	// queue is where calls wait that find no slot. When absent, each of its fields has its effective value.
	// +optional
	Queue *QueueSpec `json:"queue,omitempty"`
}

// CallerRateSpec is how often one caller may call.
type CallerRateSpec struct {
	// requests is how many calls may come in the time that per says. Between 1 and 1000000.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Requests int32 `json:"requests,omitempty"`

	// per is the time in which so many requests may come, evenly spread but for a burst. Between 1s and 24h.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="per must be between 1s and 24h"
	Per metav1.Duration `json:"per,omitzero"`

	// burst is how many may come at once after a pause. Between 1 and 10000; effective value when absent: 1.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	Burst *int32 `json:"burst,omitempty"`
}

// RateLimitSpec bounds how often a tool is called, through all gateways together. Repeats that are answered from the record are not counted.
//
// +kubebuilder:validation:XValidation:rule="has(self.requests) == has(self.per)",message="requests and per come together"
// +kubebuilder:validation:XValidation:rule="has(self.requests) || has(self.perCaller)",message="requests and per, or perCaller, must be set"
// +kubebuilder:validation:XValidation:rule="has(self.requests) || !has(self.burst)",message="burst belongs to requests and per: set them, or remove it"
type RateLimitSpec struct {
	// requests is how many calls of all callers may come in the time that per says. Between 1 and 1000000; when absent, as many as come.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Requests *int32 `json:"requests,omitempty"`

	// per is the time in which so many requests may come, evenly spread but for a burst. Between 1s and 24h.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="per must be between 1s and 24h"
	Per *metav1.Duration `json:"per,omitempty"`

	// burst is how many may come at once after a pause. Between 1 and 10000; effective value when absent: 1.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	Burst *int32 `json:"burst,omitempty"`

	// perCaller bounds how often each caller may call, beside that. When absent, a caller may call as often as all may together.
	// +optional
	PerCaller *CallerRateSpec `json:"perCaller,omitempty"`
}

// AgentToolSpec says what the tool does, where it is sent, and what makes two calls the same payment.
//
// +kubebuilder:validation:XValidation:rule="self.effect == oldSelf.effect",message="effect is immutable: make another tool"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.intentBudgetRef) || (has(self.intentBudgetRef) && self.intentBudgetRef == oldSelf.intentBudgetRef)",message="intentBudgetRef is immutable: the tool's memory is in that budget"
// +kubebuilder:validation:XValidation:rule="self.effect != 'Mutating' || has(self.intentBudgetRef)",message="a Mutating tool needs intentBudgetRef"
// +kubebuilder:validation:XValidation:rule="self.effect != 'Mutating' || has(self.identity)",message="a Mutating tool needs identity: what makes two calls the same payment"
// +kubebuilder:validation:XValidation:rule="self.effect != 'Mutating' || has(self.idempotency)",message="a Mutating tool needs idempotency: at least how the upstream receives the key"
// +kubebuilder:validation:XValidation:rule="self.effect != 'Mutating' || !has(self.upstream.http) || has(self.upstream.http.settleAfter)",message="a Mutating tool needs upstream.http.settleAfter"
// +kubebuilder:validation:XValidation:rule="!has(self.upstream.local) || self.effect == 'Mutating'",message="a local tool must be Mutating: what moves nothing needs no claim"
// +kubebuilder:validation:XValidation:rule="!has(self.upstream.local) || !(has(self.outcomes) || has(self.statusCheck) || has(self.unknownOutcome) && self.unknownOutcome != 'Hold')",message="the agent of a local tool says itself how an attempt ended, and a person decides what it does not know: remove outcomes and statusCheck, and set unknownOutcome to Hold or remove it"
// +kubebuilder:validation:XValidation:rule="!has(self.upstream.local) || !has(self.idempotency) || has(self.idempotency.key.none)",message="the agent of a local tool gets the key with its claim and passes it on itself: set idempotency.key to none"
// +kubebuilder:validation:XValidation:rule="!has(self.upstream.local) || !has(self.retryBudget) || !has(self.retryBudget.perAttemptTimeout)",message="perAttemptTimeout is for upstream.http: use upstream.local.lease"
// +kubebuilder:validation:XValidation:rule="self.effect != 'Mutating' || !has(self.cache)",message="cache is for ReadOnly tools: the answers of a Mutating tool are kept by its intents"
// +kubebuilder:validation:XValidation:rule="self.effect != 'ReadOnly' || !(has(self.concurrency) || has(self.rateLimit))",message="the limits of concurrency and rateLimit are kept in the budget's store, and a ReadOnly tool has none: remove them"
// +kubebuilder:validation:XValidation:rule="self.effect != 'ReadOnly' || !(has(self.intentBudgetRef) || has(self.identity) || has(self.idempotency) || has(self.outcomes) || has(self.retryBudget) || has(self.unknownOutcome) || has(self.statusCheck) || has(self.admission))",message="a ReadOnly tool has no intents: remove intentBudgetRef, identity, idempotency, outcomes, retryBudget, unknownOutcome, statusCheck and admission"
// +kubebuilder:validation:XValidation:rule="has(self.statusCheck) ? has(self.unknownOutcome) && self.unknownOutcome in ['StatusCheck', 'Resume'] : !has(self.unknownOutcome) || self.unknownOutcome != 'StatusCheck'",message="statusCheck and unknownOutcome StatusCheck come together; with Resume a statusCheck is optional"
// +kubebuilder:validation:XValidation:rule="(has(self.unknownOutcome) && self.unknownOutcome == 'Resume') == (has(self.idempotency) && has(self.idempotency.providerDeduplicates))",message="unknownOutcome Resume and idempotency.providerDeduplicates come together: only a provider that deduplicates may be sent the same again"
// +kubebuilder:validation:XValidation:rule="!has(self.unknownOutcome) || self.unknownOutcome != 'Resume' || !has(self.idempotency) || !has(self.idempotency.key.none)",message="unknownOutcome Resume needs a key by which the provider deduplicates: idempotency.key must not be none"
// +kubebuilder:validation:XValidation:rule="self.effect != 'ReadOnly' || !has(self.upstream.http) || !has(self.upstream.http.settleAfter)",message="a ReadOnly tool moves nothing that could settle: remove upstream.http.settleAfter"
// +kubebuilder:validation:XValidation:rule="!has(self.idempotency) || !has(self.idempotency.key.header) || !has(self.upstream.http) || !has(self.upstream.http.requestHeaders) || !(self.idempotency.key.header.lowerAscii() in self.upstream.http.requestHeaders)",message="the header of idempotency.key is written by the gateway: remove it from upstream.http.requestHeaders"
// +kubebuilder:validation:XValidation:rule="!has(self.upstream.http) || !has(self.upstream.http.credentialsFrom) || !has(self.upstream.http.requestHeaders) || !(self.upstream.http.credentialsFrom.header.lowerAscii() in self.upstream.http.requestHeaders)",message="the header of credentialsFrom is written by the gateway: remove it from upstream.http.requestHeaders"
// +kubebuilder:validation:XValidation:rule="!has(self.idempotency) || !has(self.idempotency.key.header) || !has(self.upstream.http) || !has(self.upstream.http.credentialsFrom) || self.idempotency.key.header.lowerAscii() != self.upstream.http.credentialsFrom.header.lowerAscii()",message="idempotency.key and credentialsFrom must not use the same header"
type AgentToolSpec struct {
	// description says what the tool does, for people and for models.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Description string `json:"description,omitempty"`

	// effect is Mutating for a tool whose calls move something, and ReadOnly for one that moves nothing. Immutable.
	// +required
	Effect ToolEffect `json:"effect,omitempty"`

	// intentBudgetRef names the IntentBudget, in this namespace, in which the tool's intents are compared. Immutable.
	// Required for a Mutating tool, forbidden for a ReadOnly one.
	// +optional
	IntentBudgetRef *BudgetReference `json:"intentBudgetRef,omitempty"`

	// upstream is the tool's own endpoint.
	// +required
	Upstream ToolUpstream `json:"upstream,omitzero"`

	// cache says how long an answer may be served again. Only for a ReadOnly tool; when absent, nothing is kept.
	// +optional
	Cache *ResponseCache `json:"cache,omitempty"`

	// identity says what makes two calls the same payment. Required for a Mutating tool, forbidden for a ReadOnly one.
	// +optional
	Identity *ToolIdentity `json:"identity,omitempty"`

	// idempotency says how long an answer is replayed, and how the upstream can recognise an intent.
	// Required for a Mutating tool, forbidden for a ReadOnly one.
	// +optional
	Idempotency *IdempotencySpec `json:"idempotency,omitempty"`

	// outcomes say how a complete answer of the upstream is read; the first rule that fits wins, and an answer that none fits is read by its status:
	// 2xx Succeeded, but 202 Pending; 4xx Failed, but 429 Retryable, and 408, 409 and 425 Unknown; all others Unknown. What happens
	// before an answer is complete cannot be declared. Only for a Mutating tool.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Outcomes []OutcomeRule `json:"outcomes,omitempty"`

	// retryBudget says how often an intent is tried, while every attempt is known to have moved nothing. When absent, the gateway
	// tries once a call, an intent has 5 attempts, and there are at least 2 s between them. Only for a Mutating tool.
	// +optional
	RetryBudget *RetryBudget `json:"retryBudget,omitempty"`

	// concurrency bounds how many intents of the tool are in flight at once, in all gateways together. Only for a Mutating tool; when
	// absent, as many as come.
	// +optional
	Concurrency *ConcurrencySpec `json:"concurrency,omitempty"`

	// rateLimit bounds how often the tool is called, through all gateways together. Only for a Mutating tool; when absent, callers call
	// as often as they like.
	// +optional
	RateLimit *RateLimitSpec `json:"rateLimit,omitempty"`

	// unknownOutcome says who decides about an attempt whose outcome is unknown: Hold, a person; StatusCheck, the provider is asked first,
	// as statusCheck says; Resume, the same request is sent again first, under the same key, while the provider surely knows it
	// (idempotency.providerDeduplicates) and the retry budget has attempts left. The request is kept encrypted until then; one of more than 64 KiB
	// is not, and a person decides about it. Effective value when absent: Hold. Only for a Mutating tool.
	// +optional
	UnknownOutcome UnknownOutcome `json:"unknownOutcome,omitempty"`

	// statusCheck says how the provider is asked. With unknownOutcome StatusCheck; with Resume it is optional, and asked once nothing is sent again.
	// +optional
	StatusCheck *StatusCheck `json:"statusCheck,omitempty"`

	// admission are the rules that an intent must pass before it is sent. All are asked for each call that would be sent, in their order,
	// and a rule that denies comes before one that holds. Those that deny are also a ValidatingAdmissionPolicy for the tool's
	// PaymentIntents. Only for a Mutating tool; when absent, there are none.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Admission []AdmissionRule `json:"admission,omitempty"`
}

// AgentToolStatus is what the operator has seen of the tool.
type AgentToolStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions are Accepted, Programmed and Ready, and Stalled or Reconciling only while they are true.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AgentTool is something that an agent may call.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=atool,categories=guardrails
// +kubebuilder:printcolumn:name="Effect",type=string,JSONPath=`.spec.effect`
// +kubebuilder:printcolumn:name="Budget",type=string,JSONPath=`.spec.intentBudgetRef.name`
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.spec.upstream.http.url`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="the name of an AgentTool has at most 63 characters"
type AgentTool struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec says what the tool does, where it is sent, and what makes two calls the same payment.
	// +required
	Spec AgentToolSpec `json:"spec"`

	// status is what the operator has seen of the tool.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Programmed", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status AgentToolStatus `json:"status,omitzero"`
}

// AgentToolList is a list of AgentTools.
//
// +kubebuilder:object:root=true
type AgentToolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []AgentTool `json:"items"`
}
