// Package verify checks receipts: one envelope against a key, a file with its kept output, a whole sandbox's chain,
// and a receipt against the request that it must answer.
//
// It keeps the checking half of promises P2 (this nonce, this exec id, this generation, this request), P9 (a forged or
// changed receipt is refused) and P13 (the kept output is what was hashed). It works offline, from a receipts folder
// and a public key alone. The signature itself is checked by the DSSE library, so that signing (package receipt) and
// checking do not share a mistake. receiptd does not link it; everything else may import it.
package verify
