// Sends what llm-d's token-producer sends to its vLLM backend: transport, marshalling and headers are those of llm-d-router ebab687,
// pkg/epp/framework/plugins/requestcontrol/dataproducer/tokenizer/vllm_http.go. The fixtures beside it are what a socket has read from
// `go run capture.go http://127.0.0.1:8000 CLIENT_BODY.json PATH MODEL` (go1.27.3).
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"time"
)

func newRenderTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConns = 0
	t.MaxIdleConnsPerHost = 16
	t.IdleConnTimeout = 90 * time.Second
	t.ForceAttemptHTTP2 = false
	t.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	return t
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	baseURL, bodyFile, path, modelName := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	client := &http.Client{Transport: newRenderTransport()}
	raw, err := os.ReadFile(bodyFile)
	check(err)
	var pm map[string]any // as the EPP has parsed the client's body
	check(json.Unmarshal(raw, &pm))
	body := maps.Clone(pm)
	body["model"] = modelName
	payload, err := json.Marshal(body)
	check(err)
	reqCtx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	httpReq, err := http.NewRequestWithContext(reqCtx, http.MethodPost, baseURL+path, bytes.NewReader(payload))
	check(err)
	httpReq.Header.Set("Content-Type", "application/json")
	// There, otelhttp's transport sets it from the span of the EPP.
	httpReq.Header.Set("traceparent", "00-01020304000000000000000000000000-0506070800000000-01")
	httpResp, err := client.Do(httpReq)
	check(err)
	defer httpResp.Body.Close()
	_, _ = io.Copy(io.Discard, httpResp.Body)
}
