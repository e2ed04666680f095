// The condition types and reasons that more than one kind shares.
// A new object carries its conditions as Unknown, reason Pending, from the CRD's own default:
// it never reads as healthy before the operator has looked at it.

package v1alpha1

const (
	// ConditionReady is true when the object does its work. Every kind has it; a PaymentHold's work is to tell how the hold stands.
	ConditionReady = "Ready"
	// ConditionAccepted is true when the AgentTool's spec is valid and its references hold.
	ConditionAccepted = "Accepted"
	// ConditionProgrammed is true when every live gateway runs this generation of the AgentTool.
	ConditionProgrammed = "Programmed"
	// ConditionEpochAccepted is true when the store's memory is the one that this object had before.
	ConditionEpochAccepted = "EpochAccepted"
	// ConditionDurable is true when nothing was found that could lose an acknowledged write of the store.
	ConditionDurable = "Durable"
	// ConditionDeployed is true when the server of a store is as its spec says. Only stores with deploy have it.
	ConditionDeployed = "Deployed"
	// ConditionHeld is true while the intent of a PaymentHold waits for a person.
	ConditionHeld = "Held"
	// ConditionResolved is true when the resolution of a PaymentHold has been taken by the record.
	ConditionResolved = "Resolved"
	// ConditionAdmitted is true when a PaymentIntent is registered and nothing forbids it to be sent.
	ConditionAdmitted = "Admitted"
	// ConditionSettled is true when the end of a PaymentIntent is known.
	ConditionSettled = "Settled"
	// ConditionRefundOwed is true on the newest PaymentHold of an intent that was paid although it counted as not paid, or twice, and on
	// its PaymentIntent.
	ConditionRefundOwed = "RefundOwed"
	// ConditionReconciling is present, and true, only while the operator works on the object.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is present, and true, only while nothing can go on until the spec changes.
	ConditionStalled = "Stalled"
)

const (
	// ReasonPending is the reason of every condition that nobody has looked at yet.
	ReasonPending = "Pending"
	// ReasonRebound says that the object was made again with another reference than it had before.
	ReasonRebound = "Rebound"
)
